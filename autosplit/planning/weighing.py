"""All configurations of a space weighed in units by the additive formula: for each of them its best cuts.

    sizes ─► cuts of each configuration, not moved ─► in order of their steps: boundaries moved, but of what is beaten

Sizes, cuts and moves are shared with a second core. Each of them hangs on nothing that another finds out, so who does
which of them changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np

from autosplit.aside import aside
from autosplit.errors import ScheduleError
from autosplit.partition.line_search import Learned, LineCut, Moved
from autosplit.planning.sweep import Entry, Sweep

Found = TypeVar("Found")

_GAINED = 1.05
"""A cut that is beaten so many times over in step and peak is not moved: moves gain less of a step."""
_SPARE = 1.5
"""Moves of boundaries are looked at once where they may take a cut over the limits: where it has less to spare."""
_WORTH = 500
"""Actions of all schedules from which on half of the configurations are weighed aside."""


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


@dataclass(frozen=True)
class _Cuts:
    """The cuts of one configuration, as `Weighed` has them, and what their search learned."""

    cuts: Sequence[tuple[Sequence[str], LineCut, tuple[float, ...] | None, bool]]
    learned: Learned


class Weighing:
    """The cuts of a sweep's configurations."""

    def __init__(self, sweep: Sweep, progress: Callable[[int, int], None] | None) -> None:
        self.sweep, self.progress = sweep, progress
        self.weighed: list[Weighed] = []
        self.entries: list[Entry] = []

    def weigh(self) -> None:
        """Find the best cuts of every configuration, and move the boundaries of those that may be of use."""
        every: list[Entry] = []
        found: dict[int, _Cuts | None] = {}

        def ahead() -> bool:
            """Find the cuts of one configuration more; False where all that are known have theirs."""
            place = len(found)
            if place < len(every):
                found[place] = self._cuts(every[place])
            return place < len(every)

        for entry in self.sweep.entries(ahead):
            every.append(entry)  # one by one: what is there already is cut while others are waited for
        rest = every[len(found) :]
        for entry, own in zip(every, [*found.values(), *self.each(self._cuts, rest)], strict=True):
            if own is not None:
                self.entries.append(entry.learning(own.learned))
                self.weighed += (Weighed(self.entries[-1], *cut) for cut in own.cuts)
        self._move()

    def each(self, work: Callable[[Entry], Found], entries: Sequence[Entry]) -> list[Found]:
        """Return what is worked out of each configuration, of about half of the actions aside."""
        actions = [_actions(entry) for entry in entries]
        here, there = halves(actions)
        found: dict[int, Found] = {}
        with aside(lambda: [work(entries[place]) for place in there], worth=sum(actions) >= _WORTH) as other:
            for done, place in enumerate(here):
                if self.progress is not None:
                    self.progress(2 * done, len(entries))
                found[place] = work(entries[place])
            found |= zip(there, other.result(), strict=True)
        return [found[place] for place in range(len(entries))]

    def fits(self, weighed: Weighed) -> bool:
        """Tell whether a cut keeps the devices' limits by the formula."""
        limits = self.sweep.room(weighed.entry.problem)
        return limits is None or within(weighed.cut.device_bytes, limits)

    def moved(self, weighed: Weighed) -> Weighed:
        """Return a cut with its boundaries moved; its search learns from that."""
        return _taken(weighed, self._moves(weighed))

    def _cuts(self, entry: Entry) -> _Cuts | None:
        """Return the best cut of a configuration for each way to recompute; None where its schedule cannot be built."""
        try:
            search, limits = entry.search, self.sweep.room(entry.problem)
        except ScheduleError:
            return None
        cuts: list[tuple[Sequence[str], LineCut, tuple[float, ...] | None, bool]] = []
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
            cuts.append((way, free, None, not later))
            if fits:
                break
            held = entry.best(way, limits, move=False)
            if limits is not None and held is not None:
                cuts.append((way, held, tuple(limits), False))
        return _Cuts(cuts, search.learned)

    def _move(self) -> None:
        """Move the boundaries of what fits, the fastest first, but for what another beats by more than moves gain."""
        order = sorted((place for place, each in enumerate(self.weighed) if self.fits(each)), key=self._step_s)
        likely = [place for place, beaten in self._beaten(order) if not (self.weighed[place].moved or beaten)]
        with self._begun(likely) as known:
            for place, beaten in self._beaten(order):
                each = self.weighed[place]
                if not each.moved and not beaten:
                    self.weighed[place] = _taken(each, known(place) or self._moves(each))

    def _beaten(self, order: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield cuts and whether one before is better by more than moves gain, in both step and peak.

        Each counts as it is when the next is asked for.
        """
        steps, peaks = np.full(len(order), np.inf), np.full(len(order), np.inf)
        for turn, place in enumerate(order):
            cut = self.weighed[place].cut
            beaten = (steps * _GAINED < cut.step_s) & (peaks * _GAINED < max(cut.device_bytes))
            yield place, bool(beaten.any())
            cut = self.weighed[place].cut
            steps[turn], peaks[turn] = cut.step_s, max(cut.device_bytes)

    @contextmanager
    def _begun(self, likely: Sequence[int]) -> Iterator[Callable[[int], Moved | None]]:
        """Move about half of the cuts that will likely be asked for aside, and tell of one what came of it.

        Cuts of one configuration learn from those before it: where one more or less was, nothing is known.
        """
        turns: dict[int, list[int]] = {}
        for place in likely:
            turns.setdefault(id(self.weighed[place].entry), []).append(place)
        rows = list(turns.values())
        actions = [sum(_actions(self.weighed[place].entry) for place in row) for row in rows]
        here, there = ([rows[place] for place in half] for half in halves(actions))
        known: dict[int, Moved] = {}
        asked: set[int] = set()
        unlike: set[int] = set()

        def of(place: int) -> Moved | None:
            asked.add(place)
            own = id(self.weighed[place].entry)
            row = turns.get(own, [])
            if place not in row:
                unlike.add(own)  # those behind it learn from it, and were moved without
            if not other.elsewhere or own in unlike or not asked.issuperset(row[: row.index(place)]):
                return None
            if row in there:
                known.update(zip(chain(*there), other.result(), strict=True))
            return known[place]

        worth = bool(there) and sum(actions) >= _WORTH
        with aside(lambda: [each for row in there for each in self._in_turn(row)], worth=worth) as other:
            for row in here if other.elsewhere else ():
                known.update(zip(row, self._in_turn(row), strict=True))
            yield of

    def _in_turn(self, row: Sequence[int]) -> list[Moved]:
        """Return what moves make of some cuts of one configuration, one after the other; nothing of it is kept."""
        cuts = [self.weighed[place] for place in row]
        found: list[Moved] = []
        with cuts[0].entry.search.paths.apart():
            for each in cuts:
                found.append(self._moves(each))
                each.entry.learn(found[-1].paths)
        return found

    def _moves(self, weighed: Weighed) -> Moved:
        """Return what moves make of a cut; one that was found without limits keeps them as it is, and does so on."""
        search, way, room = weighed.entry.search, weighed.way, weighed.room
        if room is not None:
            return search.moved(weighed.cut, way, room)
        way = way if isinstance(way, tuple) else [min(way, key=search.share)]
        return search.moved(weighed.cut, way, self.sweep.room(weighed.entry.problem))

    def _step_s(self, place: int) -> float:
        return self.weighed[place].cut.step_s


def halves(weights: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the places of weights in two lists that weigh about as much: the largest first, to the lighter one."""
    lists: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        lighter = sums.index(min(sums))
        lists[lighter].append(place)
        sums[lighter] += weights[place]
    return sorted(lists[0]), sorted(lists[1])


def within(held: Iterable[float], limits: Iterable[float]) -> bool:
    """Tell whether every device keeps its limit."""
    return all(own <= limit for own, limit in zip(held, limits, strict=False))


def _actions(entry: Entry) -> int:
    return entry.settled.stages * len(entry.sized.sizes)


def _taken(weighed: Weighed, moved: Moved) -> Weighed:
    """Return a cut as moves made it; its search learns from that."""
    weighed.entry.learn(moved.paths)
    return replace(weighed, cut=moved.cut, moved=True)
