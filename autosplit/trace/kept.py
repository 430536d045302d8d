"""Objects that a model keeps or is given, and returns too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autosplit.trace.objects import Structure, objects_in, take_apart
from autosplit.trace.recording import Refusal


def check_own(model: nn.Module, output: Any) -> None:
    """Raise Refusal where the output holds an object that the model keeps: a graph would return a copy of it."""
    held = {id(value) for module in model.modules() for value in vars(module).values()}
    own = next((value for value in objects_in(output) if id(value) in held), None)
    if own is not None:
        raise Refusal(f"forward returns a {type(own).__name__} that the model keeps; a graph would return a copy", "")


def check_given(given: Any, structure: Structure, leaves: Sequence[Any], output: Any) -> None:
    """Raise Refusal where the forward changed an object, list or dict that it was given, or returns such an object.

    ``structure`` and ``leaves`` are what the inputs were made of before the run. A graph works on copies of them.
    """
    objects, changed = objects_in(given), changes_given(given, structure, leaves)
    if changed and not objects:
        raise Refusal("forward changes a list or dict that it is given, and a graph would change a copy of it", "")
    held = {id(each) for each in objects}
    if changed or any(id(each) in held for each in objects_in(output)):
        kind = type(objects[0]).__name__
        raise Refusal(
            f"forward changes or returns an object that it is given (a {kind}, or one inside of it); a graph works on "
            "copies of objects: pass tensors, or tuples, lists and dicts of them",
            "",
        )


def changes_given(given: Any, structure: Structure, leaves: Sequence[Any]) -> bool:
    """Tell whether inputs are made of anything else, after a run, than of ``leaves`` in this ``structure``."""
    left, after = take_apart(given)
    return after != structure or any(
        a is not b and (type(a) is not type(b) or a != b) for a, b in _untensored(left, leaves)
    )


def _untensored(left: Sequence[Any], leaves: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of leaves; of tensors it is their identity that counts."""
    for one, other in zip(left, leaves, strict=True):
        tensors = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
        yield (id(one), id(other)) if tensors else (one, other)
