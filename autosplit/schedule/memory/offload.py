"""What blocks save for the backward lies on the host in between: one block's is copied beside the next block's work.

```
    forward    block 0 │ block 1 │ block 2        backward    block 2 │ block 1 │ block 0
    to host            │ 0 ····· │ 1 ····· │ 2    from host   2, 1    │ 0 ····· │
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autosplit.schedule.memory.pieces import Change, NodeStep, StageTrace, alive_after


def offloaded(trace: StageTrace, blocks: Mapping[str, int]) -> StageTrace:
    """Return a trace in which no block's saved storages lie on the device but beside its work and the next block's.

    ``blocks`` are the numbers of those that nodes lie in. What a later block takes, or one outside, stays.
    """
    left = alive_after(trace.forward)
    made = {s: blocks[step.node] for step in trace.forward if step.node in blocks for s, n in step.changes if n > 0}
    order = {block: at for at, block in enumerate(dict.fromkeys(made.values()))}
    freed = {s: blocks.get(step.node, -1) for step in trace.backward for s, n in step.changes if n < 0}
    sent: list[list[Change]] = [[] for _ in order]
    for storage, block in made.items():
        if storage in left and storage in freed and order.get(freed[storage], len(order)) <= order[block] + 1:
            sent[order[block]].append((storage, left[storage]))
    there = [[(storage, -count) for storage, count in each] for each in sent]
    backs = [tuple(_with(each[::-1], sent, order, blocks))[::-1] for each in (trace.backward, trace.backward_later)]
    forward = tuple(_with(trace.forward, there, order, blocks))
    return replace(trace, forward=forward, backward=backs[0], backward_later=backs[1])


def _with(
    steps: Iterable[NodeStep], copied: list[list[Change]], order: Mapping[int, int], blocks: Mapping[str, int]
) -> Iterator[NodeStep]:
    """Yield steps, and what is copied of each block where the second block behind it begins, or at the end.

    Sums of gradients that autocast's casts are made from come last in a backward, whichever block they belong to.
    """
    done, until, met = 0, 0, set[int]()
    for step in steps:
        until = max(until, order.get(blocks.get(step.node, -1), 0) - 1)
        while done < until and met.issuperset(storage for storage, _ in copied[done]):
            yield NodeStep("", tuple(copied[done]))
            done += 1
        yield step
        met.update(storage for storage, _ in step.changes)
    yield from (NodeStep("", tuple(each)) for each in copied[done:])
