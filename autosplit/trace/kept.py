"""What a model keeps of a call: tensors in its modules' attributes, and objects that it returns too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.trace.objects import objects_in
from autosplit.trace.recording import Call, Ref, Refusal

Place = tuple[str, str]


def kept_for_next_call(
    calls: Sequence[Call],
    recorded: Mapping[int, int],
    before: Mapping[Place, torch.Tensor | None],
    after: Mapping[Place, torch.Tensor | None],
) -> Place | None:
    """Return the path and name of an attribute that now holds a tensor computed in this run, if it matters.

    A tensor that replaces another one matters always, one in an empty place only if it depends on the inputs or has
    gradients (a penalty for the training loop): else it is a cache that the graph computes anew. ``recorded`` maps ids
    of tensors to the calls that returned them.
    """
    from_inputs: set[int] | None = None
    for place, tensor in after.items():
        if tensor is None or tensor is before.get(place) or id(tensor) not in recorded:
            continue
        if before.get(place) is not None or tensor.requires_grad:
            return place
        from_inputs = _from_inputs(calls) if from_inputs is None else from_inputs
        if recorded[id(tensor)] in from_inputs:
            return place
    return None


def check_own(model: nn.Module, output: Any) -> None:
    """Raise Refusal where the output holds an object that the model keeps: a graph would return a copy of it."""
    held = {id(value) for module in model.modules() for value in vars(module).values()}
    own = next((value for value in objects_in(output) if id(value) in held), None)
    if own is not None:
        raise Refusal(f"forward returns a {type(own).__name__} that the model keeps; a graph would return a copy", "")


def _from_inputs(calls: Sequence[Call]) -> set[int]:
    """Return the calls that depend on the inputs."""
    found: set[int] = set()
    for index, call in enumerate(calls):
        leaves: list[Any] = pytree.tree_leaves((call.args, call.kwargs), is_leaf=_is_ref)
        if call.kind == "input" or any(_is_ref(leaf) and leaf.index in found for leaf in leaves):
            found.add(index)
    return found


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)
