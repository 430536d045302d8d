"""The inputs of calls: those that no recording holds or can write to, and how recordings take them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autosplit.errors import InputError, TraceError
from autosplit.options import Options, Sample
from autosplit.trace.graph import INFO, TracedGraph
from autosplit.trace.inputs.inputs import has_uneven_list
from autosplit.trace.inputs.objects import leaves_of, mapped
from autosplit.trace.inputs.signature import Key

_KEPT = 32
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range, type, enum.Enum)
_CONSTANTS += (np.generic, np.ndarray, torch.dtype, torch.device, torch.layout, torch.memory_format)  # type: ignore
"""Inputs that are no tensors and tell by themselves what they are."""


class Constants:
    """Checks the inputs of calls, and counts the numbers that were among them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._numbers: dict[Any, set[Any]] = {}

    def check(self, key: Key, sample: Sample) -> None:
        """Raise TraceError for inputs that a recording cannot hold, InputError for those without values."""
        leaves = leaves_of((sample.args, sample.kwargs))
        if self.options.batch_dims is None and has_uneven_list(sample):
            raise TraceError("an input is a list of tensors of different sizes: it has no batch dimension")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            raise InputError(
                "an input is on the meta device and has no values; give one on a real device. autosplit.plan() takes "
                "meta tensors"
            )
        if any(tensor.is_nested for tensor in tensors):
            raise TraceError("an input is a nested tensor, which has no rows to cut: give a padded one with a mask")
        if self.options.batch_dims is None and any(tensor.layout is not torch.strided for tensor in tensors):
            raise TraceError("an input is a sparse tensor, which has no rows to cut: say by batch_dims= what has")
        opaque = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_CONSTANTS))), None)
        if opaque is not None:
            raise TraceError(f"an input is a {type(opaque).__name__}: what it holds may differ from call to call")
        kinds = tuple(first for first, _ in key.rest.kinds)
        values = self._numbers.setdefault(key.rest._replace(kinds=kinds), set())
        values.add(key.rest.kinds)
        if len(values) > _KEPT:
            raise TraceError(f"Python numbers among the inputs were others in {_KEPT} recordings of one kind of call")


def refusal(traced: TracedGraph, tensors: Sequence[torch.Tensor], model: nn.Module) -> str:
    """Return why a recording cannot write to the inputs of this call that the model changes; "" where it can.

    Microbatches of such an input are views of the caller's tensor, so that what they write is written there.
    """
    nodes = [node.meta[INFO] for node in traced.graph.nodes if node.op == "placeholder" and INFO in node.meta]
    changed = [place for place, info in enumerate(nodes) if info.mutated]
    for place in changed:
        tensor, dim = tensors[place], traced.inputs[place].batch_dim
        others = [*tensors[:place], *tensors[place + 1 :], *model.buffers()]
        if tensor.requires_grad:
            why = "which requires a gradient"
        elif any(_memory(other) == _memory(tensor) for other in others):
            why = "which shares memory with another input or a buffer"
        elif any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            why = "which is expanded"
        elif dim and tensor.is_contiguous():
            why = f"whose rows, along dimension {dim}, are not contiguous"
        else:
            continue
        return f"the model changes its input {traced.inputs[place].name!r} in place, {why}"
    return ""


def as_called(sample: Sample) -> Sample:
    """Return a sample as a recording, which has gradients on, takes it: without them leaves may be changed in place."""
    if torch.is_grad_enabled():
        return sample

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not (leaf.requires_grad and leaf.is_leaf) or leaf.is_inference():
            return leaf
        return leaf.view_as(leaf)

    with torch.enable_grad(), torch.inference_mode(False):
        args, kwargs = mapped(taken, (sample.args, sample.kwargs))
    return Sample(*args, **kwargs)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)
