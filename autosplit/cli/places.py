"""Places of inputs: an argument of the forward, or something inside of one that is a dict, a list or a tuple.

batch.mask   batch["a key"]   an entry of a dict
pair[0]                       a list's
pair.0                        a tuple's
pair[0].mask                  and any nesting of these
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from autosplit.cli.caret import pointed
from autosplit.errors import InputError

WORD = r"[^\W\d]\w*"
POSITION = r"0(?![0-9])|[1-9][0-9]{0,29}"
MOST_STEPS = 32
"""How deep a place may lie; nobody's batch is as deep, and what walks through one asks a call for every step."""


@dataclass(frozen=True)
class Step:
    """One step into an input: what kind of thing holds the entry, "dict", "list" or "tuple", and its key there."""

    kind: str
    key: str | int

    def __str__(self) -> str:
        if self.kind == "list":
            return f"[{self.key}]"
        if self.kind == "tuple" or re.fullmatch(WORD, str(self.key)):
            return f".{self.key}"
        return f"[{in_quotes(str(self.key))}]"


@dataclass(frozen=True)
class Place:
    """The name or the position of an argument, and the steps into it."""

    name: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(map(str, self.steps))

    def upto(self, depth: int) -> str:
        """Return the text of the place with the first ``depth`` of its steps."""
        return str(Place(self.name, self.steps[:depth]))


def in_quotes(text: str) -> str:
    """Return a text in the quotes that it does not hold itself."""
    quote = "'" if '"' in text else '"'
    return f"{quote}{text}{quote}"


def nested(given: Sequence[tuple[Place, Any]]) -> dict[str, Any]:
    """Return the arguments, by name or position, that values at places make together.

    InputError: a place is given twice, is of two kinds, or the positions of arguments, a list or a tuple have gaps.
    """
    top = _Box("dict", {})
    for place, value in given:
        _put(top, place, value)
    positions = sorted(int(name) for name in top.entries if str(name).isdecimal())
    if positions != list(range(len(positions))):
        raise InputError(f"--input positions are {positions}; number them from 0 without gaps")
    return {str(name): _made(entry) for name, entry in top.entries.items()}


@dataclass(frozen=True)
class _Leaf:
    """A value, and the place where it was given."""

    place: Place
    value: Any


@dataclass(frozen=True)
class _Box:
    """What holds other entries: its kind, the entries, the place that was given first inside of it, and how deep."""

    kind: str
    entries: dict[str | int, _Box | _Leaf]
    place: Place = Place("")
    depth: int = 0


def _put(top: _Box, place: Place, value: Any) -> None:
    """Put a value at its place, with the boxes on the way there."""
    box: _Box = top
    key: str | int = place.name
    for depth, step in enumerate(place.steps):
        inner = box.entries.setdefault(key, _Box(step.kind, {}, place, depth))
        own = place.upto(depth)
        if isinstance(inner, _Leaf):
            _fail(place, depth, f"{own} is given whole already; give that, or what is inside of it")
        if inner.kind != step.kind:
            _fail(place, depth, f"{own} is a {inner.kind} by {inner.place}, and here a {step.kind}; write one of them")
        box, key = inner, step.key
    found = box.entries.get(key)
    if isinstance(found, _Box):
        _fail(found.place, found.depth, f"{place} is given whole too; give that, or what is inside of it")
    if found is not None:
        raise InputError(f"--input {place} is given twice; give every input once")
    box.entries[key] = _Leaf(place, value)


def _made(entry: _Box | _Leaf) -> Any:
    """Return the value of an entry: a tensor, a number, or a dict, list or tuple of these."""
    if isinstance(entry, _Leaf):
        return entry.value
    if entry.kind == "dict":
        return {key: _made(inner) for key, inner in entry.entries.items()}
    positions = sorted(int(key) for key in entry.entries)
    behind = next((position for count, position in enumerate(positions) if position != count), None)
    if behind is not None:
        own, listed = entry.place.upto(entry.depth), ", ".join(map(str, positions))
        reason = f"the positions in {own} are {listed}; number them from 0 without gaps"
        _fail(entry.entries[behind].place, entry.depth, reason)
    found = [_made(entry.entries[position]) for position in positions]
    return found if entry.kind == "list" else tuple(found)


def _fail(place: Place, depth: int, reason: str) -> NoReturn:
    """Raise the error that points at one of the steps of a place."""
    raise InputError(f"--input {pointed(str(place), len(place.upto(depth)), f'{place}: {reason}')}")
