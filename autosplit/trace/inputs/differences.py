"""In what two signatures differ, in words: which entry, what it was and is, and what a script can do about it."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
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
_HELD = ("dtype", "shape", "requires_grad", "tie")
_KINDS = ("device", "requires_grad", "layout", "being a parameter")
_PLAIN = (bool, int, float, str, bytes, types.NoneType, torch.dtype, torch.device, torch.layout)
_LONGEST = 80
_PATH = "\0"
"""Stands in the name of an entry for the path to a part of it."""
_NOTHING: Any = object()
Entries = Mapping[tuple[str, str], Any]
"""Contents of a signature by the field that they are in and a name."""


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
    """Return the differences between a signature and the most similar one of others; empty if there are no others."""
    new = dict(_entries(key))
    return min((apart(dict(_entries(other)), new) for other in others), key=len, default=[])


def apart(old: Entries, new: Entries) -> list[Difference]:
    """Return the entries that differ; attributes that only one side has count only if nothing else differs."""
    names = [name for name in {**old, **new} if old.get(name, _NOTHING) != new.get(name, _NOTHING)]
    known = [name for name in names if name[0] != "attributes" or (name in old and name in new)]
    pairs = [(name, _text(old.get(name, _NOTHING)), _text(new.get(name, _NOTHING))) for name in known or names]
    return [Difference(what, before, after, _WAYS_OUT[entry]) for (entry, what), before, after in pairs]


def _entries(key: Key) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the entries of a signature, attributes and what is outside part by part."""
    counts: Counter[tuple[str, str]] = Counter()
    for entry, what, content in _contents(key):
        for path, leaf in _leaves(content):
            name = entry, what.replace(_PATH, path)
            counts[name] += 1
            yield name if counts[name] == 1 else (entry, f"{name[1]} ({counts[name]})"), leaf


def _contents(key: Key) -> Iterator[tuple[str, str, Any]]:
    rest = key.rest
    yield "modes", "grad mode", rest.modes.grad
    for state in rest.modes.autocast:
        yield "modes", f"autocast of {state.device_type}", (state.enabled, state.dtype)
    for module in rest.modules:
        owner = f"the module `{module.path}`" if module.path else "the model"
        as_model = bool(module.path) and module.training == rest.modules[0].training
        yield "kind", f"class of {owner}", module.kind
        yield "training", f"training mode of {owner}", "the model's" if as_model else str(module.training)
        yield "hooks", f"hooks of {owner}", module.hooks
        for table, word in _TABLES.items():
            for name, content in getattr(module, table):
                if table in ("parameters", "buffers") and isinstance(content, tuple):
                    for fact, value in zip(_HELD, content, strict=False):
                        yield table, f"{fact} of the {word} `{name}` of {owner}", value
                else:
                    yield table, f"{word} `{name}{_PATH}` of {owner}", content
    for path, value in rest.outside:
        yield "outside", f"`{'.'.join(filter(None, path))}` that its code names", value
    for index, ((kind, other), shape) in enumerate(zip_longest(rest.kinds, key.shapes[: len(rest.kinds)])):
        if shape is None or not isinstance(kind, torch.dtype):  # of what was refused only the kinds are known
            yield "kinds", f"input {index}", (kind, other)
            continue
        yield "shapes", f"shape of input {index}", shape
        for fact, value in zip(("dtype", *_KINDS), (kind, *other), strict=True):
            yield "kinds", f"{fact} of input {index}", value
    yield "structure", "structure of the inputs", rest.structure
    yield "same", "which inputs are one tensor", rest.same


def _leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of a content that is a class or an identity and pairs of name and content, with their paths."""
    if _has_parts(content):
        yield path, content[0]
        for name, child in content[1]:
            yield from _leaves(child, f"{path}.{name}")
    else:
        yield path, content


def _has_parts(content: Any) -> bool:
    if not isinstance(content, tuple) or len(content) != 2 or not isinstance(content[1], tuple):
        return False
    return all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in content[1])


def _text(content: Any) -> str:
    """Return a content of a signature as a reader of the script knows it."""
    if content is _NOTHING:
        return "not there"
    if isinstance(content, Identity):
        content = content.value()
        if content is None:
            return "an object that is gone"
    if isinstance(content, (type, types.FunctionType)):
        return f"`{content.__qualname__}`"
    if isinstance(content, types.CodeType):
        return f"`{content.co_qualname}`"
    if isinstance(content, tuple) and content and isinstance(content[0], type):  # classes, and what is of them
        return str(content[-1]) if content[0] in (str, float, complex) else _text(content[-1])
    if isinstance(content, tuple):
        text = f"({', '.join(map(_text, content))})"
    else:
        text = str(content) if isinstance(content, _PLAIN) else f"a {type(content).__qualname__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
