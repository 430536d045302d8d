"""How many replicas each stage gets where that is left open: PipeDream's solver on the units of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from autosplit.options import Options
from autosplit.partition.line.coarse import Coarse
from autosplit.partition.line.line import Line
from autosplit.partition.problem import RECOMPUTE
from autosplit.partition.replication import Floats, flushed, replicate
from autosplit.planning.profiled.formulate import state_bytes
from autosplit.planning.profiled.problem import ProfiledProblem
from cost_models.collectives import REACHED


@dataclass(frozen=True)
class Sized:
    """A model that was profiled for microbatches of one size, whole and in units."""

    case: ProfiledProblem
    coarse: Coarse
    line: Line
    once_s: float
    """What runs once per step beside the stages."""


def once_on_last(sized: Sized, options: Options) -> bool:
    """Tell whether one device has to run what is last: operations that mix rows, or the loss of one process."""
    return bool(sized.case.recorded.outline.full) or (options.machine is None and len(set(options.devices)) > 1)


def best_replicas(sized: Sized, options: Options, *, recompute: Sequence[str] | None, limit: float) -> tuple[int, ...]:
    """Return the replicas of each stage with which a step is shortest, the sum of gradients included.

    Devices are alike. Stages hold no more than ``limit`` bytes, with as much recomputed as may be; where no stages do,
    that plays no part. Where one device has to run what is last (`once_on_last`) the last stage has no replicas.
    """
    line, devices, microbatches = sized.line, len(options.devices), len(sized.case.sizes)
    slowest = min((link.bandwidth_bytes_per_s for link in options.links), default=np.inf)
    summed_s = np.zeros(line.size + 1)
    first = sized.case.recorded.outline.first
    for state in sized.case.costs.state.values():
        works = [work for name in state.uses if (work := first.get(name)) is not None]
        if works:
            unit = sized.coarse.unit_of[works[0]]
            summed_s[unit + 1] += state_bytes(state, options).gradient / (REACHED * slowest)
    works_s = np.diff(line.forward_s + line.backward_s, prepend=0.0)
    mixed = np.arange(line.size + 1) == (line.size if once_on_last(sized, options) else -1)
    free = flushed(works_s, summed_s, line.cut_s, minibatches=microbatches)

    def stage_s(replicas: int, ahead: int) -> Floats:
        return np.where(mixed & (replicas > 1), np.inf, free(replicas, ahead))

    held = [line.table(option) for option in recompute or RECOMPUTE]

    @cache
    def fits(in_flight: int) -> np.ndarray:
        least: np.ndarray = np.minimum.reduce([np.maximum(row.fixed + in_flight * row.each, row.least) for row in held])
        return least <= limit

    def within(replicas: int, ahead: int) -> Floats:
        seconds = stage_s(replicas, ahead)
        return np.where(fits(min(-(-ahead // replicas), microbatches)), seconds, np.inf)

    best = replicate(within, devices=devices) or replicate(stage_s, devices=devices)
    return () if best is None else best.replicas
