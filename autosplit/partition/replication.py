"""Stages with replicas: the cut of a line of layers, and how many devices each stage has (PipeDream's planner).

A stage of ``m`` replicas deals minibatches out round robin, so that each replica has one in ``m``. What the stage takes
per minibatch (Narayanan et al., SOSP 2019, section 3.1; Harlap et al., arXiv 1806.03377):

    T(i, j, m) = max(seconds of the layers i .. j - 1, exchange of their gradients) / m

The slowest stage or transfer is to be fastest. Stages are chosen from the last to the first, so that each knows how
many devices work from it on, which sets how many minibatches it holds:

    least(i, n) = min over j, m of max(T(i, j, m), transfer at j, least(j, n - m))

Every cut and every number of replicas is weighed, so the answer is optimal: no bound is needed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
StageSeconds = Callable[[int, int], Floats]
"""What stages take: of so many replicas, where so many devices work from them on; [first layer, layer behind].

Infinite where a stage is not allowed, and where it would have no layer (`stages_only`).
"""
_TIES = 1 + 1e-12


@dataclass(frozen=True)
class Replication:
    """Stage ``k`` has the layers from ``bounds[k]`` to ``bounds[k + 1]`` and ``replicas[k]`` devices.

    ``bottleneck_s`` is what the slowest stage takes per minibatch: the least possible.
    """

    bounds: tuple[int, ...]
    replicas: tuple[int, ...]
    bottleneck_s: float


def flushed(works_s: Floats, bytes_s: Floats, sent_s: Floats, *, minibatches: int) -> StageSeconds:
    """Return how much each stage adds to a step of ``minibatches``, beyond the time of the first minibatch.

    The first minibatch passes all stages, whatever the cut. A replica also runs its other minibatches, and exchanges
    gradients once: ``T`` is ``(ceil(minibatches / m) - 1)`` times the stage's work, and one exchange.

    Args:
        works_s: seconds of each layer, after a leading 0.
        bytes_s: seconds of its gradients on a link, after a leading 0.
        sent_s: seconds of what crosses the cut behind each layer, both ends included; each replica has its own link.
        minibatches: the number of minibatches, and the most replicas of a stage.
    """
    work_s, gradients_s, border_s = between(works_s), between(bytes_s), np.maximum(sent_s[:, None], sent_s[None, :])

    @cache
    def own_s(replicas: int) -> Floats:
        if replicas > minibatches:
            return np.full_like(work_s, np.inf)
        seconds = (-(-minibatches // replicas) - 1) * work_s + 2 * (replicas - 1) / replicas * gradients_s
        return stages_only(np.maximum(seconds, minibatches / replicas * border_s))

    return lambda replicas, ahead: own_s(replicas)


def between(each: Floats) -> Floats:
    """Return the sum over the layers between every two cuts; ``each`` begins with a 0."""
    sums: Floats = each.cumsum()
    return sums[None, :] - sums[:, None]


def stages_only(seconds: Floats) -> Floats:
    """Return a table that is infinite where a stage would end before it begins."""
    return np.where(np.tri(len(seconds), dtype=np.bool_), np.inf, seconds)


def replicate(stage_s: StageSeconds, *, devices: int) -> Replication | None:
    """Return the stages whose slowest is fastest with all devices in use; None where none is allowed.

    Of equally fast ones those whose times add up to least, so there are no more stages than need be.
    """
    slowest_s = _program(stage_s, devices, np.maximum)[0]
    if not math.isfinite(slowest_s):
        return None

    def within(replicas: int, ahead: int) -> Floats:
        seconds = stage_s(replicas, ahead)
        return np.where(seconds <= slowest_s * _TIES, seconds, np.inf)

    return Replication(*_program(within, devices, np.add)[1:], slowest_s)


def _program(stage_s: StageSeconds, devices: int, join: np.ufunc) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Return the least value of a chain of stages over all devices, its bounds and its replicas."""
    size = len(stage_s(1, 1))
    least = np.full((devices + 1, size), np.inf)
    least[0, -1] = 0.0
    for n in range(1, devices + 1):
        for m in range(1, n + 1):
            np.minimum(least[n], join(stage_s(m, n), least[n - m]).min(axis=1), out=least[n])
    bounds, replicas, n = [0], [], devices
    while math.isfinite(least[-1, 0]) and n:
        ways = [join(stage_s(m, n)[bounds[-1]], least[n - m]) for m in range(1, n + 1)]
        m = 1 + int(np.argmin([option.min() for option in ways]))
        bounds.append(int(ways[m - 1].argmin()))
        replicas.append(m)
        n -= m
    return float(least[-1, 0]), tuple(bounds), tuple(replicas)
