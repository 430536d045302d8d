"""One recording: the model's forward on fake tensors at a given batch size.

Private torch interfaces used here (checked with torch 2.11, 2.13 and 2.15): ``FakeTensorMode`` (no public module offers
shape-only execution), and ``torch.compiler``'s compiling and exporting flags, which send transformers' models down
their trace-friendly mask path.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from autosplit.errors import TraceError
from autosplit.trace import state
from autosplit.trace.kept import kept_for_next_call
from autosplit.trace.record import Recorder, Recording


@dataclass(frozen=True)
class FlatInputs:
    """The flattened inputs of one call: leaves, structure, names, and the batch dimension of each leaf (None: none)."""

    leaves: tuple[Any, ...]
    spec: Any
    names: tuple[str, ...]
    batch_dims: tuple[int | None, ...]

    def tensors(self) -> list[int]:
        """Return the positions of the tensors among the leaves."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments made of other leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args, kwargs


def record(
    model: nn.Module, inputs: FlatInputs, *, rows: int, entered: frozenset[str], hooks: bool = True
) -> Recording:
    """Record the model's forward at ``rows`` batch rows; the model is as before at the end.

    Raises TraceError for what a graph cannot follow; the model's own exceptions pass through.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    seed = torch.initial_seed()
    before, held = state.python_numbers(model), state.held_tensors(model)
    held_contents = state.contents(state.attribute_tensors(model))
    with state.random_state(), held_contents, state.attributes(model), state.fake_tensors(model, mode):
        random.seed(rows)  # each recording has other Python draws: what hangs on them shows as a difference
        np.random.seed(rows)
        leaves = [_fake(leaf, dim, rows, mode) for leaf, dim in zip(inputs.leaves, inputs.batch_dims, strict=True)]
        recorder = Recorder(model, entered, hooks=hooks)
        for index in inputs.tensors():
            recorder.add_input(inputs.names[index], leaves[index])
        args, kwargs = inputs.rebuild(leaves)
        try:
            with torch.inference_mode(False), _quiet_log(), _patched(recorder), mode, recorder.random, recorder:
                output = model(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
            raise TraceError(
                f"a shape or a Python value depends on a tensor's contents ({str(error).splitlines()[0]})"
                f"{_notes(error)}; a graph cannot follow that"
            ) from error
        changed = [key for key, value in state.python_numbers(model).items() if before.get(key, value) != value]
        if changed:
            path, name = changed[0]
            raise TraceError(
                f"forward changes the Python attribute {name!r} of module {path or 'root'!r} at every call; a graph "
                "would freeze it: keep it in a registered buffer"
            )
        kept = kept_for_next_call(recorder.calls, recorder.recorded(), held, state.held_tensors(model))
        if torch.initial_seed() != seed:
            raise TraceError("forward sets torch's random seed; a graph would not: set it outside the model")
        if kept is not None:
            raise TraceError(
                f"forward keeps a tensor in the attribute {kept[1]!r} of module {kept[0] or 'root'!r} for its next "
                "call; a graph would not: keep it in a registered buffer"
            )
        return recorder.finish(output, dict(model.named_buffers()))


def _fake(leaf: Any, dim: int | None, rows: int, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = list(leaf.shape)
    if dim is not None:
        shape[dim] = rows
    with mode:
        fake = torch.empty(shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)
        return fake if leaf.is_leaf else fake.clone()


def _notes(error: BaseException) -> str:
    return "".join(f", {note}" for note in getattr(error, "__notes__", ()))


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep FakeTensorMode from printing a traceback for an exception that is about to be raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextlib.contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """Show calls of modules and of autograd functions to a recorder; those of other threads go on as ever."""
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    own = threading.get_ident()

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != own:
            return call(module, *args, **kwargs)
        return recorder.call_module(call, module, args, kwargs)

    def apply_function(function: type, *args: Any, **kwargs: Any) -> Any:
        plain = apply.__get__(None, function)
        if threading.get_ident() != own:
            return plain(*args, **kwargs)
        return recorder.call_function(plain, function, args, kwargs)

    with (
        patch.object(nn.Module, "__call__", call_module),
        patch.object(torch.autograd.Function, "apply", classmethod(apply_function)),
        patch.multiple(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True),
    ):
        yield
