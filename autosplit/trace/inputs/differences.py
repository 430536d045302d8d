"""In what two signatures differ, in words: which entry, what it was and is, and what a script can do about it."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from autosplit.trace.inputs.python_state import Identity
from autosplit.trace.inputs.signature import Key

_WAYS_OUT = {
    "modes": "each grad mode and autocast is recorded once; leave them as they are in the loop",
    "training": "each combination of modes is recorded once; call train() and eval() of the whole pipe",
    "kind": "make the pipe of a model whose class stays, and make it anew where the class is defined anew",
    "hooks": "register hooks once, before the loop",
    "children": "leave the modules of the model as they are in the loop",
    "parameters": "freeze, convert or replace parameters before the loop",
    "buffers": "change the values of buffers in place",
    "attributes": "forward reads it: make what changes from call to call an input or a buffer, or keep it elsewhere",
    "outside": "forward or a hook names it: give what changes from call to call as an input",
    "structure": "give the inputs in the same form in each call",
    "kinds": "give inputs of one dtype, device and layout, and numbers that change from call to call as tensors",
    "same": "give one tensor twice in each call or in none",
    "shapes": "a size that was seen at two lengths is recorded for all; pad what is recorded length by length",
    "values": "compute the choice with torch.where, or move it out of forward",
}
_TABLES = {"children": "child", "parameters": "parameter", "buffers": "buffer", "attributes": "attribute"}
_HOLDS_TENSORS = ("parameters", "buffers")
_HELD = ("dtype", "shape", "requires_grad", "tie")
_KINDS = ("device", "requires_grad", "layout", "being a parameter")
_LONGEST = 80
Entries = Mapping[tuple[str, str], Any]
"""Contents of a signature, by the field that they are in and a name of their own."""
_NOTHING: Any = object()
"""Stands for an entry that there is not."""


class Words(str):
    """A text that stands for a value."""

    __repr__ = str.__str__


class Difference(NamedTuple):
    """An entry that two signatures have with other values: its name, the values as text, and the way out."""

    what: str
    before: str
    after: str
    way_out: str

    def __str__(self) -> str:
        after = self.after if self.before != self.after else f"another {self.after.removeprefix('a ')}"
        return f"{self.what} was {self.before}, is {after}"


def nearest(key: Key, others: Iterable[Key]) -> list[Difference]:
    """Return in what a signature differs from that of some others that is most like it; nothing where there is none."""
    return min((differences(other, key) for other in others), key=len, default=[])


def differences(before: Key, after: Key) -> list[Difference]:
    """Return in what two signatures differ; attributes that one of them does not look at only where nothing else is."""
    old, new = dict(_entries(before)), dict(_entries(after))
    apart = [name for name in {**old, **new} if old.get(name, _NOTHING) != new.get(name, _NOTHING)]
    known = [name for name in apart if name[0] != "attributes" or (name in old and name in new)]
    return _between(old, new, known or apart)


def of_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return in what the values differ that two recordings have read, by the names of the reads."""
    old, new = (
        {("values", f"value read by {name}"): value for name, value in read.items()} for read in (before, after)
    )
    return _between(old, new, [name for name in {**old, **new} if old.get(name, _NOTHING) != new.get(name, _NOTHING)])


def _between(old: Entries, new: Entries, names: Iterable[tuple[str, str]]) -> list[Difference]:
    found = []
    for entry, what in names:
        where, space, owner = what.partition("` of ")
        for path, one, other in _parts(old.get((entry, what), _NOTHING), new.get((entry, what), _NOTHING)):
            found.append(Difference(f"{where}{path}{space}{owner}", _text(one), _text(other), _WAYS_OUT[entry]))
    return found


def _entries(key: Key) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the entries of a signature."""
    rest = key.rest
    yield ("modes", "grad mode"), rest.modes.grad
    for state in rest.modes.autocast:
        yield ("modes", f"autocast of {state.device_type}"), (state.enabled, state.dtype)
    for module in rest.modules:
        owner = f"the module `{module.path}`" if module.path else "the model"
        yield ("kind", f"class of {owner}"), module.kind
        as_model = bool(module.path) and module.training == rest.modules[0].training
        yield ("training", f"training mode of {owner}"), Words("the model's") if as_model else module.training
        yield ("hooks", f"hooks of {owner}"), module.hooks
        for table, word in _TABLES.items():
            for name, content in getattr(module, table):
                if table in _HOLDS_TENSORS and isinstance(content, tuple):
                    for fact, value in zip(_HELD, content, strict=False):
                        yield (table, f"{fact} of the {word} `{name}` of {owner}"), value
                else:
                    yield (table, f"{word} `{name}` of {owner}"), content
    counts: Counter[str] = Counter()
    for place, value in rest.outside:
        what = f"`{'.'.join(filter(None, place))}` that its code names"
        counts[what] += 1
        yield ("outside", what if counts[what] == 1 else f"{what} ({counts[what]})"), value
    for index, (kind, other) in enumerate(rest.kinds):
        if key.shapes[index] is None:
            yield ("kinds", f"input {index}"), (kind, other)
            continue
        yield ("kinds", f"dtype of input {index}"), kind
        for fact, value in zip(_KINDS, other, strict=True):
            yield ("kinds", f"{fact} of input {index}"), value
        yield ("shapes", f"shape of input {index}"), key.shapes[index]
    yield ("structure", "structure of the inputs"), rest.structure
    yield ("same", "which inputs are one tensor"), rest.same


def _parts(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts in which two contents differ, with the path that leads to them."""
    if isinstance(before, tuple) and isinstance(after, tuple) and before and after and before[0] == after[0]:
        old, new = _named_parts(before), _named_parts(after)
        if old is not None and new is not None:
            for name in {**old, **new}:
                one, other = old.get(name, _NOTHING), new.get(name, _NOTHING)
                if one != other:
                    yield from _parts(one, other, f"{path}.{name}")
            return
    yield path, before, after


def _named_parts(content: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return the parts of a content that is a class or an identity and pairs of name and content; else None."""
    if len(content) != 2 or not isinstance(content[1], tuple):
        return None
    pairs = content[1]
    return dict(pairs) if all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) for p in pairs) else None


def _text(content: Any) -> str:
    """Return a content of a signature as a reader of the script knows it."""
    if content is _NOTHING:
        return "not there"
    if isinstance(content, Identity):
        value = content.value()
        return "an object that is gone" if value is None else _object_text(value)
    if isinstance(content, tuple) and content and isinstance(content[0], (type, Identity)):
        if len(content) == 2 and _named_parts(content) is None:  # a number or text, and its class
            return str(content[1]) if content[0] in (str, float, complex) else _short(repr(content[1]))
        if len(content) == 1 + len(content[-1] if isinstance(content[-1], tuple) else ()):
            return _short(repr(content[-1]))
        return f"a {content[0].__qualname__}" if isinstance(content[0], type) else _text(content[0])
    return _short(f"[{', '.join(map(_text, content))}]") if isinstance(content, tuple) else _object_text(content)


def _object_text(value: Any) -> str:
    if isinstance(value, (type, types.FunctionType)):
        return f"`{value.__qualname__}`"
    if isinstance(value, types.CodeType):
        return f"`{value.co_qualname}`"
    plain = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.layout)
    return _short(repr(value)) if value is None or isinstance(value, plain) else f"a {type(value).__qualname__}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
