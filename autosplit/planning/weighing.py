"""All configurations of a space weighed in units by the additive formula: for each of them its best cuts.

    sizes ─► cuts of each configuration, not moved ─► in order of their steps: boundaries moved, but of what is beaten

Peaks are the additive formula's; nothing is replayed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autosplit.partition.line_search import LineCut
from autosplit.planning.sweep import Entry, Sweep

_GAINED = 1.05
"""A cut that is beaten so many times over in step and peak is not moved: moves gain less of a step."""
_SPARE = 1.5
"""Moves of boundaries are looked at once where they may take a cut over the limits: where it has less to spare."""


@dataclass(frozen=True)
class Weighed:
    """A cut of one configuration and what it costs by the formula; ``room`` is what it was found for, if anything.

    ``moved``: whether its boundaries were moved, as far as that is worth while.
    """

    entry: Entry
    way: Sequence[str]
    cut: LineCut
    room: tuple[float, ...] | None
    moved: bool = True


class Weighing:
    """The cuts of a sweep's configurations."""

    def __init__(self, sweep: Sweep, progress: Callable[[int, int], None] | None) -> None:
        self.sweep, self.progress = sweep, progress
        self.weighed: list[Weighed] = []
        self.entries: list[Entry] = []

    def weigh(self) -> None:
        """Find the best cuts of every configuration, and move the boundaries of those that may be of use."""
        self.entries = [entry for entry in self.sweep.entries() if entry.has_schedule]
        for done, entry in enumerate(self.entries):
            if self.progress is not None:
                self.progress(done, len(self.entries))
            self.weighed += self._cuts(entry)
        self._move()

    def fits(self, weighed: Weighed) -> bool:
        """Tell whether a cut keeps the devices' limits by the formula."""
        limits = self.sweep.room(weighed.entry.problem)
        return limits is None or within(weighed.cut.device_bytes, limits)

    def moved(self, weighed: Weighed) -> Weighed:
        """Return a cut with its boundaries moved; one that was found without limits keeps them as it is."""
        search, way, room = weighed.entry.search, weighed.way, weighed.room
        if room is not None:
            cut = search.moved(weighed.cut, way, room)
        else:
            way = way if isinstance(way, tuple) else [min(way, key=search.share)]
            cut = search.moved(weighed.cut, way, self.sweep.room(weighed.entry.problem))
        return replace(weighed, cut=cut, moved=True)

    def _cuts(self, entry: Entry) -> list[Weighed]:
        """Return the best cut of a configuration for each way to recompute."""
        limits = self.sweep.room(entry.problem)
        cuts: list[Weighed] = []
        for way in self.sweep.ways(entry.settled.stages):
            free = entry.best(way, None, move=False)
            assert free is not None, "without limits every line of enough units can be cut"
            fits = limits is None or within(free.device_bytes, limits)
            spare = limits is None or within([_SPARE * held for held in free.device_bytes], limits)
            later = fits and spare and not cuts
            if fits and not later:
                free = entry.best(way, None)
                assert free is not None, "what can be cut can be moved"
                fits = limits is None or within(free.device_bytes, limits)
            # What does not fit is only there to be compared with, and stays as it is.
            cuts.append(Weighed(entry, way, free, None, not later))
            if fits:
                break
            held = entry.best(way, limits, move=False)
            if limits is not None and held is not None:
                cuts.append(Weighed(entry, way, held, tuple(limits), moved=False))
        return cuts

    def _move(self) -> None:
        """Move the boundaries of what fits, the fastest first.

        A cut stays as it is where one before is better, in both step and peak, by more than moves gain.
        """
        order = sorted((place for place, each in enumerate(self.weighed) if self.fits(each)), key=self._step_s)
        steps, peaks = np.full(len(order), np.inf), np.full(len(order), np.inf)
        for turn, place in enumerate(order):
            each = self.weighed[place]
            beaten = (steps * _GAINED < each.cut.step_s) & (peaks * _GAINED < max(each.cut.device_bytes))
            if not each.moved and not beaten.any():
                each = self.weighed[place] = self.moved(each)
            steps[turn], peaks[turn] = each.cut.step_s, max(each.cut.device_bytes)

    def _step_s(self, place: int) -> float:
        return self.weighed[place].cut.step_s


def within(held: Iterable[float], limits: Iterable[float]) -> bool:
    """Tell whether every device keeps its limit."""
    return all(own <= limit for own, limit in zip(held, limits, strict=False))
