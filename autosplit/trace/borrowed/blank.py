"""Tensors without values in the places of a model's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autosplit.trace.borrowed.holders import Holders

_CPU = torch.device("cpu")


def blank(tensor: torch.Tensor, dtype: torch.dtype | None = None, size: torch.Size | None = None) -> torch.Tensor:
    """Return a tensor on meta that is like another one, of another dtype or size where one is given."""
    if size is not None:
        new = torch.empty(size, dtype=dtype or tensor.dtype, device="meta")
    else:
        new = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


def fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device = _CPU) -> torch.Tensor:
    """Return a fake twin of a tensor, on a device."""
    if tensor.device == device:
        leaf = tensor if tensor.is_leaf else tensor.detach().requires_grad_()
        return mode.from_tensor(leaf, static_shapes=True)
    twin = FakeTensor(mode, blank(tensor).detach().requires_grad_(tensor.requires_grad), device)
    if isinstance(tensor, nn.Parameter):
        twin._is_param = True  # what makes isinstance(twin, Parameter) true, as torch's own conversion does
    return twin


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether every element of a tensor's memory is one of its own, once, in any order."""
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_meta(model: nn.Module) -> bool:
    """Tell whether a model has a parameter or buffer on meta."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def home_of(model: nn.Module) -> torch.device | None:
    """Return the device that a model lies on; None where it lies on several, or has no parameters and buffers."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return devices.pop() if len(devices) == 1 else None


def lies_apart(model: nn.Module, inputs: Iterable[torch.Tensor]) -> bool:
    """Tell whether a model cannot run by itself: it lies on several devices, or on another one than its inputs.

    A model that was split does. Inputs on the CPU beside others on the model's device are taken to be wanted there, as
    lengths are. Tensors on meta do not count.
    """
    held = {t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
    devices = {t.device for t in inputs if not t.is_meta}
    return len(held) > 1 or bool(held and devices and not held <= devices <= held | {_CPU})


@contextlib.contextmanager
def without_values(
    model: nn.Module,
    sizes: Mapping[int, torch.Size] = MappingProxyType({}),
    dtypes: Mapping[int, torch.dtype] = MappingProxyType({}),
) -> Iterator[None]:
    """Have all parameters and buffers of a model on meta, wherever its modules hold them; ties stay ties.

    So a model of which one process has a part, and others the rest, is recorded in each of them as one that is on meta.
    ``sizes``: those of tensors of which there is a part here, by identity; ``dtypes``: those that others are to have.

    At the end, also of an exception, the model holds its own tensors again, and all its attributes are as before; a
    graph that was recorded inside reads the model's own tensors from then on.
    """
    tensors = dict.fromkeys((*model.parameters(), *model.buffers()))
    changed = [t for t in tensors if not t.is_meta or id(t) in dtypes]
    with Holders([model]).swapped([(t, blank(t, dtypes.get(id(t)), sizes.get(id(t)))) for t in changed]):
        yield
