"""What the processes of a plan send each other: which lanes to which, and what waits on the way.

A receive is posted before the action that takes its values, and a send may end after the one that made them:

    lane 0   F0 │ F1 ...                     the output of F0 is kept for its backward anyway
    lane 1      │[F0's values] F0 │ [F1's values] ...       a microbatch ahead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from autosplit.planning.plan.record import Boundary
from autosplit.schedule.action import Schedule


def sending_pairs(boundaries: Sequence[Boundary], schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return the lanes that send to one another, sender first: values, and where there is a backward their gradients.

    Values that are sent once per step and tied parameters are among them.
    """
    there = {
        pair
        for boundary in boundaries
        for source, target in _lanes(boundary, schedule)
        for pair in product(source[:1] if boundary.per_step else source, target)
    }
    return frozenset(there | {(b, a) for a, b in there if schedule.has_backward})


def waiting_bytes(boundaries: Sequence[Boundary], schedule: Schedule, flows: Mapping[str, bool]) -> Counter[int]:
    """Return the bytes of messages that wait on each lane, one microbatch of each.

    A consumer has values before it takes them, and the gradients that it has sent until they are gone; a producer has
    gradients before it takes them. ``flows``: whether gradients flow back through a value.
    """
    waiting: Counter[int] = Counter()
    for boundary in boundaries:
        back = boundary.producer in schedule.differentiated and flows.get(boundary.value, False)
        for source, target in () if boundary.per_step else _lanes(boundary, schedule):
            waiting.update(dict.fromkeys(target, boundary.bytes * (2 if back else 1)))
            waiting.update(dict.fromkeys(source, boundary.bytes * back))
    return waiting


def _lanes(boundary: Boundary, schedule: Schedule) -> Iterator[tuple[range, range]]:
    """Yield the lanes of the stages that a value goes between, by the stage that takes it; all have the batch."""
    for consumer in boundary.consumers if boundary.producer >= 0 else ():
        pair = schedule.lanes_of(boundary.producer), schedule.lanes_of(consumer)
        if pair[0] != pair[1]:
            yield pair
