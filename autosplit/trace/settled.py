"""Attributes that a model's first call sets for good: sizes that it clamps, flags that it drops.

    first call    self.shift == 3, sets it to 0 ─► calls ...
    second call   self.shift == 0, changes nothing ─► the same calls, so that one graph is both

The graph does not set them; the first call of a pipe does, since a call with other inputs may read them. What was None
or absent and is a number or text now is such an attribute too; what was filled with anything else is a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from autosplit.trace.python_state import Place

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()
_OWN = frozenset(nn.Module().__dict__)


def plain_values(model: nn.Module, places: Iterable[Place]) -> dict[Place, Any] | None:
    """Return what attributes are now; None where one is no number, text or None, or a tuple of these."""
    values = {place: _of(model, place) for place in places}
    return values if all(map(_is_plain, values.values())) else None


def empty_ones(model: nn.Module) -> dict[Place, bool]:
    """Return for each attribute of the modules whether it is None."""
    return {
        (path, name): value is None
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in _OWN
    }


def filled_or_gone(model: nn.Module, empty: Mapping[Place, bool]) -> list[Place]:
    """Return the attributes that were None or absent and are plain values now, and those that are gone."""
    now = empty_ones(model)
    filled = [place for place, is_empty in now.items() if not is_empty and empty.get(place, True)]
    gone = [place for place in empty if place not in now]
    return [*(place for place in filled if _is_plain(_of(model, place))), *gone]


def pending(model: nn.Module, settled: Mapping[Place, Any]) -> dict[Place, Any]:
    """Return those of the settled attributes that the model has not got so yet."""
    return {place: value for place, value in settled.items() if not _equal(_of(model, place), value)}


def settle(model: nn.Module, settled: Mapping[Place, Any]) -> bool:
    """Give a model the attributes that its own call would have set; tell whether any was another one."""
    missing = pending(model, settled)
    for (path, name), value in missing.items():
        model.get_submodule(path).__dict__[name] = value
    return bool(missing)


def words(settled: Mapping[Place, Any]) -> str:
    """Return what a report says of settled attributes."""
    (path, name), value = next(iter(settled.items()))
    more = f", and {len(settled) - 1} more" if len(settled) > 1 else ""
    return (
        f"the first call sets the Python attribute {name!r} of module {path or 'root'!r} to {value!r}{more}; recorded "
        "from there a second call does the same and changes nothing"
    )


def _of(model: nn.Module, place: Place) -> Any:
    return model.get_submodule(place[0]).__dict__.get(place[1], _MISSING)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _equal(now: Any, value: Any) -> bool:
    return type(now) is type(value) and repr(now) == repr(value)
