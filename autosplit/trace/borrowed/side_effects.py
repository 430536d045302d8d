"""What a forward leaves in Python: counters, flags, logs, hooks, tensors that it keeps.

recording   runs the forward and reads all holders before and after ─► changes; tensors in them become outputs
call        runs the model's own Python once, on fake tensors ─► are its calls the recorded ones? ─► its changes
            runs the program ─┬─► the caller's outputs
                              └─► the tensors that are kept, put where the fake ones were left
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autosplit.trace.borrowed.contents import Holder, Place
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.borrowed.logged import LoggedNumber, is_logged
from autosplit.trace.borrowed.values import (
    GONE,
    ITERATORS,
    applied,
    difference,
    is_object,
    position,
    slots_of,
    with_parts,
)
from autosplit.trace.inputs.objects import Structure, objects_in, take_apart
from autosplit.trace.recording.recording import Refusal
from autosplit.trace.scope import has_hooks, is_layer

_DEPTH = 8
_REGISTERED = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Changes:
    """What a run changed: per holder the entries that are others now, and the iterators that went on."""

    holders: Holders
    entries: tuple[tuple[Holder, Any, Mapping[Any, Any]], ...] = ()
    """The holders, what was in them before the run, and what is another now."""
    iterators: Sequence[tuple[Any, Any]] = ()

    def __bool__(self) -> bool:
        return bool(self.entries or self.iterators)

    @property
    def places(self) -> frozenset[Place]:
        """Where it is: a module's path and attribute, or "" and what holds it."""
        changed = [place for holder, before, entries in self.entries for place in holder.places(before, entries)]
        return frozenset((*changed, *((("", "an iterator"),) if self.iterators else ())))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the new values, each once, in order."""
        return list({id(leaf): leaf for leaf in self._leaves() if isinstance(leaf, torch.Tensor)}.values())

    def numbers(self) -> list[LoggedNumber]:
        """Return the numbers among the new values that are known when the program has run, and their operands."""
        kept = [number for leaf in self._leaves() if is_logged(leaf) for number in leaf.with_operands()]
        return list({id(number): number for number in kept}.values())

    def _leaves(self) -> list[Any]:
        leaves: list[Any] = []

        def note(leaf: Any) -> Any:
            leaves.append(leaf)
            return leaf

        for *_, entries in self.entries:
            for value in entries.values():
                _mapped(value, note)
        return leaves

    def made_or_gone(self) -> list[str]:
        """Return the parameters, buffers and modules that were not there before, or are gone."""
        tables = [entry for entry in self.entries if entry[0].place[1] in _REGISTERED]
        return [
            f"{holder.place[0]}.{name}".strip(".")
            for holder, before, entries in tables
            for name, value in entries.items()
            if (before.get(name) is None) != (value is None or value is GONE)
        ]

    def without(self, handled: Callable[[Holder, Any, Any], bool]) -> Changes:
        """Return those for whose holder, key and value ``handled`` is not true."""
        left = [(h, was, {k: v for k, v in now.items() if not handled(h, k, v)}) for h, was, now in self.entries]
        return replace(self, entries=tuple(entry for entry in left if entry[-1]))

    def make(self, real: Mapping[int, torch.Tensor]) -> None:
        """Make the changes for good, with the real tensors in the places of fake ones, by id."""

        def known(leaf: Any) -> Any:
            return real.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf.compute(real)

        for holder, _, entries in self.entries:
            content = {key: _mapped(value, known) for key, value in entries.items()}
            holder.write(applied(holder.read(), content))
        self.holders.swap(self.iterators)


def changes(holders: Holders, before: Sequence[Any]) -> Changes:
    """Return what is another value now than in the contents ``before``; what hooks of the caller's did is left out."""
    pairs = zip(holders.found, before, strict=True)
    entries = [(holder, was, difference(was, holder.read())) for holder, was in pairs if not holder.of_hook]
    stands = [(old, stand) for old, stand in holders.stands.values() if type(old) in ITERATORS]
    moved = [(old, stand) for old, stand in stands if position(old) != position(stand)]
    return Changes(holders, tuple(entry for entry in entries if entry[-1]), moved)


def kept(changes: Changes, known: Collection[int]) -> list[torch.Tensor]:
    """Return the tensors that a run computed and left, except those whose ids are ``known``."""
    assigned = changes.without(lambda holder, key, value: holder.place[1] == "_buffers")
    return [tensor for tensor in assigned.tensors() if id(tensor) not in known]


@contextlib.contextmanager
def by_hooks(module: nn.Module, path: str, holders: Holders | None, places: set[Place]) -> Iterator[None]:
    """Add to ``places`` what a module with hooks changes in Python; it is one call of the graph, which repeats that.

    Raises Refusal for modules that are not torch's layers: their hooks would change it once per microbatch.
    """
    watched = holders if has_hooks(module) else None
    before = [] if watched is None else watched.read()
    yield
    if watched is not None and (changed := changes(watched, before)):
        if not is_layer(module):
            raise Refusal(f"module {path!r} has hooks and changes Python state: {words(changed.places)}", path)
        places |= changed.places


def words(places: Iterable[Place]) -> str:
    """Return what a report says of changes."""
    (path, name), *more = sorted(places)
    where = f"the Python attribute {name!r} of module {path or 'root'!r}" if name not in ("an iterator",) else name
    also = f", and {len(more)} more" if more else ""
    return (
        f"forward changes {where}{also}: the model's own Python runs once per call, on fake tensors, to leave what the "
        "plain model leaves"
    )


def _mapped(value: Any, function: Callable[[Any], Any], depth: int = _DEPTH) -> Any:
    """Return a value with ``function`` of its tensors, and of numbers that are known later, in their places.

    Lists, dicts and objects are changed in place.
    """
    if isinstance(value, torch.Tensor) or is_logged(value):
        return function(value)
    if not depth or value is GONE or isinstance(value, nn.Module):
        return value
    if isinstance(value, (tuple, set, frozenset)):
        return with_parts(value, lambda item: _mapped(item, function, depth - 1))
    if isinstance(value, (dict, list, deque)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (other := _mapped(item, function, depth - 1)) is not item:
                value[key] = other
    if is_object(value):
        for name, item in {**getattr(value, "__dict__", {}), **slots_of(value)}.items():
            if (other := _mapped(item, function, depth - 1)) is not item:
                object.__setattr__(value, name, other)
    return value


# -- objects that are given or kept ------------------------------------------------------------------------------------
def check_own(model: nn.Module, output: Any) -> None:
    """Raise Refusal where the output holds an object that the model keeps: a graph would return a copy of it."""
    held = {id(value) for module in model.modules() for value in vars(module).values()}
    first = next((value for value in objects_in(output) if id(value) in held), None)
    if first is not None:
        raise Refusal(f"forward returns a {type(first).__name__} that the model keeps; a graph would return a copy", "")


def check_given(inputs: Any, structure: Structure, leaves: Sequence[Any], output: Any) -> None:
    """Raise Refusal where the forward changed an object, list or dict that it was given, or returns such an object.

    ``structure`` and ``leaves`` are what the inputs were made of before the run. A graph works on copies of them.
    """
    objects, (left, after) = objects_in(inputs), take_apart(inputs)
    changed = after != structure or any(_is_other(a, b) for a, b in zip(left, leaves, strict=True))
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


def _is_other(leaf: Any, before: Any) -> bool:
    """Tell whether a leaf is another one than before; of tensors it is their identity that counts."""
    if leaf is before:
        return False
    return isinstance(leaf, torch.Tensor) or type(leaf) is not type(before) or bool(leaf != before)
