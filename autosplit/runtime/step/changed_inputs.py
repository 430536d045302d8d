"""Calls whose inputs a pipeline cannot change in place as the model does.

Microbatches of an input that the model changes are views of the caller's tensor, so that what they write is written
there. That is not possible for every tensor; the model's own Python then runs on the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autosplit.options import Sample
from autosplit.trace.graph import INFO, TracedGraph
from autosplit.trace.inputs.objects import mapped


def refusal(traced: TracedGraph, tensors: Sequence[torch.Tensor], model: nn.Module) -> str:
    """Return why a recording cannot write to the inputs of this call that the model changes; "" where it can."""
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
