"""Microbatches of other sizes, their number as it is: what is searched for one size, and how far a cut of it holds.

    leanest cuts of a size ─► replayed at others ─► the last that it holds ─► search at the next one: nothing fits, or
                                      ▲                                                              │
                                      └───────────────── a cut that fits ────────────────────────────┘

A replay of a cut that is known takes a tenth of a search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autosplit.planning.choose import Choice, leanest
from autosplit.planning.finish import Finished, bounded, elsewhere
from autosplit.planning.paper import OnPaper
from autosplit.planning.plan import Plan
from autosplit.planning.sweep import Shared, Space, Sweep

_FURTHER = 1.02
"""Leanest cuts are looked for again where those before them held so many times as much as known before."""


@dataclass
class Batches:
    """Batches of ``chunks`` microbatches, of ``fewest`` to ``most`` rows each.

    Attributes:
        held: the largest size of microbatches that is known to fit surely, one less than ``fewest`` without any.
        cut: what holds it.
    """

    paper: OnPaper
    space: Space
    chunks: int
    fewest: int
    most: int
    shared: Shared
    held: int = field(init=False)
    cut: Finished | None = None
    _choices: dict[int, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space, self.held = replace(self.space, chunks=(self.chunks,)), self.fewest - 1

    def at(self, each: int) -> Choice:
        """Return what is best for microbatches of a size."""
        if each not in self._choices:
            self._choices[each] = Choice(self._sweep(each, self.space))
        return self._choices[each]

    def plan(self, each: int) -> Plan:
        """Return the plan for microbatches of a size; where the search finds none that fits, of the cut that does."""
        choice = self.at(each)
        if choice.sure or self.cut is None or each > self.held:
            return choice.plan
        return choice.plan_of(bounded(self._elsewhere(self.cut, each)))

    def largest(self, *, guess: int) -> int:
        """Return the largest size that surely fits, one less than ``fewest`` where none does.

        At the next size a search finds nothing. ``guess`` is where the leanest cuts are looked for first.
        """
        at = guess
        while self._further(leanest(self._sweep(at, self.space)), at) and self.held < self.most:
            at = self.held + 1
        above, step = self.most + 1, 1
        while self.held + 1 < above:
            at = min(self.held + step, (self.held + above) // 2)
            choice = self.at(at)
            if choice.sure:
                self._further(choice.finished, at)
                above, step = above if self.held < above else self.most + 1, 2 * step
            else:
                above, step = at, 1
        return self.held

    def _further(self, cut: Finished | None, at: int) -> bool:
        """Take note of how far a cut holds that was replayed at a size; tell whether that is much further."""
        if cut is None:
            return False
        known = {at: cut.fullest}

        def fullest(each: int) -> float:
            return known[each] if each in known else self._elsewhere(cut, each).fullest

        end, before = last(fullest, at=at, low=self.fewest, high=self.most), self.held
        if end > before:
            self.held, self.cut = end, cut
        return end > _FURTHER * before

    def _elsewhere(self, cut: Finished, each: int) -> Finished:
        options = cut.entry.options
        own = replace(self.space, schedules=((options.schedule, options.virtual_stages),))
        sweep = self._sweep(each, own)
        return elsewhere(sweep, next(sweep.entries()), cut)

    def _sweep(self, each: int, space: Space) -> Sweep:
        paper = self.paper
        return Sweep(paper.model, paper.found, paper.options, space, rows=each * self.chunks, shared=self.shared)


def last(ratio: Callable[[int], float], *, at: int, low: int, high: int) -> int:
    """Return the last number from ``low`` to ``high`` whose ratio is 1 at most; ``low - 1`` where none is.

    The ratio never falls, and grows about as a line does: where that would be 1 is looked at next, each third time the
    middle.
    """
    known: dict[int, float] = {}
    below, above = low - 1, high + 1
    while below + 1 < above:
        known[at] = ratio(at)
        below, above = (at, above) if known[at] <= 1.0 else (below, at)
        middle = len(known) % 3 == 0 and below >= low and above <= high
        at = min(max((below + above) // 2 if middle else _crossing(known), below + 1), above - 1)
    return below


def _crossing(known: dict[int, float]) -> int:
    """Return where a line through the two nearest to a ratio of 1, one on each side if there are such, would be 1.

    One alone is taken for proportional.
    """
    under = sorted(at for at, ratio in known.items() if ratio <= 1.0)[-2:]
    over = sorted(at for at, ratio in known.items() if ratio > 1.0)[:2]
    points = [*under[-1:], *over[:1]] if under and over else under or over
    start, end = points[0], points[-1]
    rise = known[end] - known[start]
    if start == end:
        return int(start / max(known[start], 0.01))
    if rise <= 0.0:
        return 2 * end if under else start // 2
    return int(start + (1.0 - known[start]) * (end - start) / rise)
