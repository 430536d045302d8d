"""The recordings of a model that are kept, by the signatures of the calls for which they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from autosplit.options import Sample
from autosplit.recorded import Recorded
from autosplit.trace.inputs.signature import Key

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_KEPT = 32


class Recent(OrderedDict[_Key, _Value]):
    """A dict that forgets what was set or used longest ago."""

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > _KEPT:
            self.popitem(last=False)

    def use(self, key: _Key) -> None:
        """Make an entry, where there is one, the last to be forgotten."""
        if len(self) > 1 and key in self:
            self.move_to_end(key)


class Kept(Recent[Key, tuple[Recorded, ...]]):
    """A bounded cache, the last run at the end; there are several for a signature where they hold for some values."""

    def keep(self, key: Key, recorded: Recorded) -> None:
        """Keep a recording for calls of a signature, before its other variants; the oldest ones go."""
        self[key] = (recorded, *(other for other in self.get(key, ()) if other is not recorded))

    def first(self, key: Key, sample: Sample) -> Recorded | None:
        """Return the recording of a signature that holds for the values of a batch, or None."""
        return _first(self.get(key, ()), key, sample)

    def covering(self, key: Key, sample: Sample) -> Recorded | None:
        """Return a recording made at other sizes that is known to hold for a call, or None."""
        for known, variants in reversed(self.items()):
            alike = (recorded for recorded in variants if recorded.kind.rest == key.rest and recorded.covers(key))
            if (recorded := _first(alike, key, sample)) is not None:
                self.use(known)
                return recorded
        return None

    def alike(self, key: Key) -> Iterator[Recorded]:
        """Yield the recordings that differ from a kind of call in sizes at most, once, the newest first."""
        kept = [recorded for variants in [*reversed(self.values())] for recorded in variants]
        yield from {id(recorded): recorded for recorded in kept if recorded.kind.rest == key.rest}.values()

    def failed_generalizations(self, key: Key) -> int:
        """Return how many attempts to make one recording of several lengths failed for this kind of call."""
        return max((recorded.failed_generalizations for recorded in self.alike(key)), default=0)

    def replacing(self, base: Recorded, wide: Recorded) -> Recorded:
        """Keep a recording for many lengths where one for one length was kept, as far as it is known to hold."""
        for key, variants in list(self.items()):
            if any(recorded is base for recorded in variants) and wide.covers(key):
                self[key] = tuple(wide if recorded is base else recorded for recorded in variants)
        return wide

    def renew(self, earlier: Collection[Any], key: Key) -> None:
        """Keep for a kind of call what was kept for the signatures that it had before, except for the shapes.

        It holds whatever the values are of attributes that it did not touch itself.
        """
        for known in [known for known in self if known.rest in earlier]:
            for recorded in reversed(self.pop(known)):
                recorded.kind = replace(recorded.kind, rest=key.rest)
                self.keep(Key(key.rest, known.shapes), recorded)


def _first(recordings: Iterable[Recorded], key: Key, sample: Sample) -> Recorded | None:
    return next((recorded for recorded in recordings if recorded.holds(key, sample)), None)
