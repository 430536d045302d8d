"""1F1B without a flush (PipeDream, Narayanan et al. 2019): the order of a lane's actions, and which weights they use.

A lane runs some forwards to fill the pipeline, then a backward and a forward in turn, for as long as minibatches come.
Replicas of a stage take microbatches in turn (1F1B-RR). Behind the backwards of a *round* the stage's optimizer steps:
a round is a minibatch of each replica, or under "2bw" one minibatch, whose microbatches the replicas share. Version v
of a stage's weights is what v updates have made. F3 is the forward of minibatch 3, U1 the update by round 1, numbers
below are versions; three stages, and then one of two replicas behind another stage:

```
    stage 0     F0 F1 F2 .  .  B0 U0 F3 B1 U1 F4 B2      "stash": forward and backward of a minibatch use one version
    version     0  0  0        0     1  1     2  2
    replica 0   F0 B0 F2 B2 F4                           U1 takes in minibatches 2 and 3
    replica 1   .  F1 B1 U0 F3 B3 U1 F5
    version     0  0  0     0  0     1
```
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autosplit.errors import InputError
from autosplit.schedule.action import Kind
from autosplit.schedule.orders import held_per_replica

STALENESS = ("stash", "vertical", "2bw")
"""The newest version of each stage at the forward (PipeDream), one version on all stages (its vertical sync), or that
of the minibatch before the last (PipeDream-2BW, Narayanan et al. 2021)."""
Needs = tuple[tuple[Kind, int], ...]


class StreamAction(NamedTuple):
    """What a lane does.

    Attributes:
        kind: F, B, or U: a round's update.
        minibatch: of U the last one of its round.
        offset: which microbatch of the minibatch.
        microbatch: its number in the stream; of U that of the round's last one, were the round whole.
        update: the number of the update that takes in its gradients.
        last: the number of the round's last microbatch, were the round whole.
        needs: what other lanes of the stage must have done: B by its microbatch, U by its number.
    """

    kind: Kind
    minibatch: int
    offset: int
    microbatch: int
    update: int
    last: int
    needs: Needs = ()


def updates_behind(staleness: str, replicas: Sequence[int]) -> list[int]:
    """Return how many updates the weights of each stage are behind: those of the rounds just before a minibatch's.

    Under "stash" a stage is behind by the minibatches that a replica holds beside it (`held_per_replica`), as in the
    paper. A replica goes on when it is through with its own part of a round, and would wait for the others' parts
    unless they began at once: such a stage is behind by one more. Minibatches come in groups as large as the greatest
    common divisor of all replicas. The first stage need not wait for them, so there what the next one holds decides.

    Raises InputError for "vertical" where stages have replicas.
    """
    stages = len(replicas)
    if staleness == "vertical" and max(replicas) > 1:
        raise InputError(
            f"staleness='vertical' is one version on all stages, and stages of {list(replicas)} replicas update after "
            "different numbers of minibatches; give staleness='stash' or '2bw'"
        )
    if staleness != "stash":
        return [1 if staleness == "2bw" else stages - 1] * stages
    group, held = math.gcd(*replicas), held_per_replica(replicas)
    behind = [number - 1 + (count > group) for number, count in zip(held, replicas, strict=True)]
    next_held = held[1] * replicas[1] if stages > 1 else 0
    return [1 - (group - next_held) // replicas[0], *behind[1:]]


def round_size(staleness: str, replicas: int) -> int:
    """Return how many minibatches an update of a stage takes in."""
    return replicas if staleness == "stash" else 1


def weight_version(staleness: str, replicas: Sequence[int], stage: int, minibatch: int) -> int:
    """Return which version of a stage's weights a minibatch uses, in its forward and in its backward."""
    return max(0, minibatch // round_size(staleness, replicas[stage]) - updates_behind(staleness, replicas)[stage])


def replica_actions(
    stage: int, replica: int, replicas: Sequence[int], staleness: str, microbatches: Callable[[int], int | None]
) -> Iterator[StreamAction | None]:
    """Yield the actions of a replica that has weights of its own, and so makes every update of the stage.

    It updates when it needs the new weights. If it does not know of a next minibatch, it makes the updates whose
    gradients the other replicas certainly have: each holds back the last minibatches that it knows of.
    """
    count, size = replicas[stage], round_size(staleness, replicas[stage])
    held_back = held_per_replica(replicas)[stage] * count - 1
    known = updated = total = 0
    ends: deque[int] = deque()  # how many microbatches there are up to the end of each round that was not made

    def told(minibatch: int) -> int | None:
        nonlocal known, total
        if cells := microbatches(minibatch):
            known, total = minibatch + 1, total + cells
            if not known % size:
                ends.append(total)
        return cells

    def updates(until: int) -> Iterator[StreamAction]:
        nonlocal updated
        for update in range(updated, until):
            if ends:
                ends.popleft()
            yield StreamAction("U", min((update + 1) * size, known) - 1, 0, replica, update, replica)
        updated = max(updated, until)

    for cell in stream_actions(stage, replica, replicas, staleness, told):
        if cell is None:
            yield from updates(updated + sum(end + held_back <= total for end in ends))
            yield None
        elif cell.kind == "U":
            yield from updates(cell.update + 1)
        else:
            yield from updates(max((number + 1 for kind, number in cell.needs if kind == "U"), default=0))
            yield cell
    yield from updates(math.ceil(known / size))


def ahead(staleness: str, replicas: Sequence[int]) -> tuple[int, int]:
    """Return how many minibatches, and how many microbatches of those behind them, are in flight before a loss is due.

    With these every stage can step by the first one: it is a whole round, and no replica holds its part back.
    """
    return max(round_size(staleness, count) for count in replicas), held_per_replica(replicas)[0] * replicas[0]


def stream_actions(
    stage: int, replica: int, replicas: Sequence[int], staleness: str, microbatches: Callable[[int], int | None]
) -> Iterator[StreamAction | None]:
    """Yield the actions of a replica's lane; that of the last replica also makes the update of an incomplete round.

    ``microbatches`` returns how many a minibatch has, and None after the end of the stream. It may block until that is
    known, or return 0: then None is yielded, and it is called again.
    """
    count, held, behind = replicas[stage], held_per_replica(replicas)[stage], updates_behind(staleness, replicas)[stage]
    size = round_size(staleness, count)
    flying: deque[StreamAction] = deque()
    minibatch = first = known = 0  # known: how many updates the lane has waited for, or made

    def updates(until: int) -> Needs:
        nonlocal known
        before, known = known, max(known, until)
        return tuple(("U", update) for update in range(before, until))

    def update(cell: StreamAction, begin: int, end: int) -> StreamAction:
        others = range(max(begin, cell.last + 1 - count), end)
        backwards: Needs = tuple(("B", other) for other in others if other % count != replica)
        needs = updates(cell.update) + backwards
        updates(cell.update + 1)
        return StreamAction("U", cell.minibatch, cell.offset, cell.last, cell.update, cell.last, needs)

    def back() -> Iterator[StreamAction]:
        cell = flying.popleft()
        yield StreamAction("B", *cell[1:-1])
        if cell.microbatch == cell.last:
            yield update(cell, cell.microbatch - cell.offset if size == 1 else cell.last + 1 - count, cell.last)

    while (cells := microbatches(minibatch)) is not None:
        if not cells:
            yield None
            continue
        number = minibatch // size
        last = first + cells - 1 if size == 1 else (number + 1) * size - 1
        while flying and flying[0].update < number - behind:
            yield from back()
        for offset in range((replica - first) % count, cells, count):
            cell = StreamAction("F", minibatch, offset, first + offset, number, last, updates(number - behind))
            flying.append(cell)
            yield cell
            if len(flying) == held:
                yield from back()
        minibatch, first = minibatch + 1, first + cells
    while flying:
        yield from back()
    if minibatch % size and replica == count - 1:
        number = minibatch // size
        rest = StreamAction("U", minibatch - 1, 0, minibatch - 1, number, (number + 1) * size - 1)
        yield update(rest, number * size, minibatch)
