"""What the processes of a plan send each other: which lanes to which, and what waits on the way.

A receive is posted before the action that takes its values, and a send may end after the one that made them:

    lane 0   F0 │ F1 ...                     the output of F0 is kept for its backward anyway
    lane 1      │[F0's values] F0 │ [F1's values] ...       a microbatch ahead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autosplit.planning.plan.record import Boundary
from autosplit.schedule.action import Schedule


def sending_pairs(boundaries: Sequence[Boundary], schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return the lanes that send to one another, sender first: values, and where there is a backward their gradients.

    Values that are sent once per step and tied parameters are among them.
    """
    there = {pair for boundary in boundaries for pair in _lanes(boundary, schedule)}
    return frozenset(there | {(b, a) for a, b in there if schedule.has_backward})


def waiting_bytes(boundaries: Sequence[Boundary], schedule: Schedule, flows: Mapping[str, bool]) -> Counter[int]:
    """Return the bytes of messages that wait on each lane, one microbatch of each.

    A consumer has values before it takes them, and the gradients that it has sent until they are gone; a producer has
    gradients before it takes them. ``flows``: whether gradients flow back through a value.
    """
    waiting: Counter[int] = Counter()
    for boundary in boundaries:
        back = schedule.has_backward and flows.get(boundary.value, False)
        for source, target in () if boundary.per_step else _lanes(boundary, schedule):
            waiting[target] += boundary.bytes * (2 if back else 1)
            waiting[source] += boundary.bytes * back
    return waiting


def _lanes(boundary: Boundary, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield the lanes that a value goes between, once per stage that takes it; the batch is on every rank."""
    for consumer in boundary.consumers if boundary.producer >= 0 else ():
        pair = schedule.stage_lane[boundary.producer], schedule.stage_lane[consumer]
        if pair[0] != pair[1]:
            yield pair
