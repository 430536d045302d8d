"""1F1B without a flush (PipeDream, Narayanan et al. 2019): the order of a lane's actions, and which weights they use.

A stage runs ``stages - stage`` forwards to fill the pipeline, then a backward and a forward in turn, for as long as
minibatches come. Behind the backward of a minibatch's last microbatch its optimizer steps: version v of a stage's
weights is what v updates have made. Three stages, F3 is the forward of minibatch 3, numbers below are versions:

```
    stage 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5
    version   0  0  0        0  1  0  2  0  3         "stash": forward and backward of a minibatch use one version
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from autosplit.schedule.action import Kind

STALENESS = ("stash", "vertical", "2bw")
"""The newest version of each stage at the forward (PipeDream), one version on all stages (its vertical sync), or that
of the minibatch before the last (PipeDream-2BW, Narayanan et al. 2021)."""


def weight_version(staleness: str, stages: int, stage: int, minibatch: int) -> int:
    """Return which version of a stage's weights a minibatch uses, in its forward and in its backward."""
    behind = {"stash": stages - 1 - stage, "vertical": stages - 1, "2bw": 1}[staleness]
    return max(0, minibatch - behind)


def versions_held(staleness: str, stages: int, stage: int) -> int:
    """Return how many versions of a stage's weights there are at most, the newest included."""
    return {"stash": stages - stage, "vertical": stages, "2bw": 2}[staleness]


def stream_actions(
    stage: int, stages: int, staleness: str, microbatches: Callable[[int], int | None]
) -> Iterator[tuple[Kind, int, int, bool] | None]:
    """Yield what a lane does: the kind, the minibatch, which of its microbatches, and whether that is the last one.

    ``microbatches`` returns how many a minibatch has, None where the stream has ended. It may wait until that is
    known, or return 0: None is yielded then, and it is asked again.
    """
    flying: deque[tuple[int, int, bool]] = deque()
    minibatch = updates = 0
    while (count := microbatches(minibatch)) is not None:
        if not count:
            yield None
            continue
        for place in range(count):
            version = weight_version(staleness, stages, stage, minibatch)
            while len(flying) == stages - stage or updates < version:
                yield "B", *flying[0]
                updates += flying.popleft()[-1]
            cell = minibatch, place, place == count - 1
            yield "F", *cell
            flying.append(cell)
        minibatch += 1
    for cell in flying:
        yield "B", *cell
