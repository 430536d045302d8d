"""Which inputs of a call a recording can hold as constants."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx

from autosplit.errors import InputError, TraceError
from autosplit.options import Options, Sample
from autosplit.trace.inputs import has_uneven_list
from autosplit.trace.objects import leaves_of
from autosplit.trace.signature import Key

_KEPT = 32
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range, type, enum.Enum)
_CONSTANTS += (np.generic, np.ndarray, torch.dtype, torch.device, torch.layout, torch.memory_format)  # type: ignore
"""Inputs that are no tensors and tell by themselves what they are."""


def refuse_tracers(leaves: Sequence[Any]) -> None:
    """Raise InputError where a call is made to be traced: what a pipe does with lanes and modules is no such graph."""
    tracing = torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]
    if tracing or any(isinstance(leaf, fx.Proxy) for leaf in leaves):
        raise InputError(
            "a pipe cannot be traced by torch.jit.trace, torch.export or torch.fx: trace the model, which "
            "pipe.unsplit() gives back; pipe.code is the program that the pipe runs"
        )


def refuse_transformed() -> NoReturn:
    """Raise InputError for the first call of a kind, which has to be recorded, under a transform."""
    raise InputError(
        "the first call of its kind is made under a transform of torch.func or forward-mode differentiation, where a "
        "model cannot be recorded: call the pipe once without it, with inputs of the same shapes and in the same mode"
    )


def refuse_unplanned() -> NoReturn:
    """Stand for the program of a pipe that was not called yet; raise InputError where something runs it."""
    raise InputError("the pipe has no program before its first call: call it once, or pass sample=")


class Constants:
    """Checks the inputs of calls, and counts the numbers that were among them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._numbers: dict[Any, set[Any]] = {}

    def check(self, key: Key, sample: Sample) -> None:
        """Raise TraceError for inputs that a recording cannot hold as constants."""
        leaves = leaves_of((sample.args, sample.kwargs))
        if self.options.batch_dims is None and has_uneven_list(sample):
            raise TraceError("an input is a list of tensors of different sizes: it has no batch dimension")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_nested for tensor in tensors):
            raise TraceError("an input is a nested tensor, which has no rows to cut: give a padded one with a mask")
        if self.options.batch_dims is None and any(tensor.layout is not torch.strided for tensor in tensors):
            raise TraceError("an input is a sparse tensor, which has no rows to cut: say by batch_dims= what has")
        opaque = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_CONSTANTS))), None)
        if opaque is not None:
            raise TraceError(f"an input is a {type(opaque).__name__}: what it holds may differ from call to call")
        modes, structure, spec, kinds = key.rest
        values = self._numbers.setdefault((modes, structure, spec, tuple(first for first, _ in kinds)), set())
        values.add(kinds)
        if len(values) > _KEPT:
            raise TraceError(f"Python numbers among the inputs were others in {_KEPT} recordings of one kind of call")
