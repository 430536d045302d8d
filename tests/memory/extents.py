"""How much changes take: the most that is alive at once, and what stays, both above what was alive before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autosplit.schedule.memory.pieces import NodeStep


@dataclass(frozen=True)
class Extent:
    peak_bytes: int
    left_bytes: int


def extent(steps: Iterable[NodeStep]) -> Extent:
    live = peak = 0
    for step in steps:
        for _, count in step.changes:
            live += count
            peak = max(peak, live)
    return Extent(peak, live)
