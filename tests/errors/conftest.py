"""The promise behind every error: the model is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn


def _shape_of(model: nn.Module) -> dict[str, Any]:
    """Return all that identifies the model's state without its values: objects, flags, devices, attribute names."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        found[name] = (id(module), type(module), sorted(vars(module)), hooks, module.training, module.forward.__func__)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"parameter {name}"] = (id(parameter), parameter.device, parameter.requires_grad, id(parameter.grad))
        found[f"storage {name}"] = (parameter.data_ptr(), parameter._version, sorted(vars(parameter)))
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = (id(buffer), buffer.device, buffer.data_ptr())
    return found


@contextmanager
def _unchanged(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
    values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    shape, state, threads = _shape_of(model), torch.get_rng_state(), torch.get_num_threads()
    yield
    assert _shape_of(model) == shape
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    if args or kwargs:
        model(*args, **kwargs)


@pytest.fixture
def unchanged() -> Callable[..., AbstractContextManager[None]]:
    """Check that the block leaves the model as it was, and that it still runs on the inputs that follow it."""
    return _unchanged
