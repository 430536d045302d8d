"""What a model keeps of a call: tensors in its modules' attributes, and objects that it returns too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.trace.objects import Structure, objects_in, take_apart
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


def check_given(given: Any, structure: Structure, leaves: Sequence[Any], output: Any) -> None:
    """Raise Refusal where the forward changed the attributes of an object that it was given, or returns that object.

    ``structure`` and ``leaves`` are what the inputs were made of before the run. A graph works on copies of objects.
    """
    objects = objects_in(given)
    if not objects:
        return
    left, after = take_apart(given)
    same = after == structure and all(a is b or (type(a) is type(b) and a == b) for a, b in _untensored(left, leaves))
    held = {id(each) for each in objects}
    if not same or any(id(each) in held for each in objects_in(output)):
        kind = type(objects[0]).__name__
        raise Refusal(
            f"forward changes or returns an object that it is given (a {kind}, or one inside of it); a graph works on "
            "copies of objects: pass tensors, or tuples, lists and dicts of them",
            "",
        )


def _untensored(left: Sequence[Any], leaves: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of leaves; of tensors it is their identity that counts."""
    for one, other in zip(left, leaves, strict=True):
        tensors = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
        yield (id(one), id(other)) if tensors else (one, other)


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
