"""The cuts that programs over a line propose, against a program for every limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autosplit.partition.line.interval_dp import _SHARES, _TIES, IntervalDP, StageSlot
from autosplit.partition.line.line import Line
from tests.partition.test_line_search import random_problem


def every_limit(bands: IntervalDP) -> list[tuple[int, ...]]:
    """Return the cuts of one program per limit on the longest stage, none of them left out."""
    found: list[tuple[int, ...]] = []
    line, spans = bands.line, bands.spans
    crossing_s = (line.cut_s[spans.tail] + line.cut_s[spans.ends])[: bands.widest]
    for share, more in _SHARES:
        costs = [own + share * crossing_s for own in bands.cost] if share else bands.cost
        shortest = bands._program(costs, highest=True)
        if shortest is None:
            break
        found.append(shortest[1])
        for limit in more:
            within = [np.where(own <= shortest[0] * limit * (1 + 1e-12), own, np.inf) for own in costs]
            least = bands._program([own + _TIES * own * own / shortest[0] for own in within], highest=False)
            if least is not None:
                found.append(least[1])
    return list(dict.fromkeys(found))


def places(stages: int, limit: float | None, scales: Sequence[float]) -> list[StageSlot]:
    options = (("never", 0.0), ("always", 1.0))
    return [StageSlot(scales[stage % len(scales)], stages - stage, options, limit) for stage in range(stages)]


class CountedBands(IntervalDP):
    """Counts its programs."""

    programs = 0

    def _program(self, costs: Sequence[np.ndarray], *, highest: bool) -> tuple[float, tuple[int, ...]] | None:
        self.programs += 1
        return super()._program(costs, highest=highest)


def test_a_limit_that_a_cut_keeps_anyway_needs_no_program_of_its_own() -> None:
    saved = 0
    for seed in range(12):
        line = Line(random_problem(seed, works=40, devices=5))
        for limit in (None, 250.0, 120.0, 60.0, 10.0):
            for scales in ((1.0,), (1.0, 1.7)):
                bands = CountedBands(line, places(5, limit, scales), widest=40)
                cuts = list(bands.chains())
                made, bands.programs = bands.programs, 0
                assert cuts == every_limit(bands)
                saved += bands.programs - made
    assert saved
