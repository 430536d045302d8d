"""Between which bytes a peak may come out: what no trace of tensors tells, and by how much it can be wrong.

```
    low     peak − lists − guessed                               tensors alone: the allocator wastes nothing
    high    peak + guessed + estimated    + two cuBLAS workspaces + fragments
```

The rule, for devices with CUDA's allocator whose own memory is the limit:

- *lists*: what the optimizer's step holds beside its state. Torch's default on CUDA (``foreach``) has lists as large as
  the parameters; which kind runs is the caller's, and ``fused=True`` has none.
- *guessed*: scratch of kernels that nobody measured (``Workspace.source == "unknown"``): it may be nothing, or twice.
- *estimated*: where an operation did not run on fake tensors, what it saves was taken from what it is given; a tenth of
  all that is no state is added.
- *cuBLAS* keeps a workspace per handle in the allocator's memory: one for the forward's thread, another for autograd's.
  Where nothing calls it there is none, and the peak is that of tensors: so the least has none, and a peak lies in its
  own range.
- *fragments*: what the allocator reserves beyond what is asked for, as `memory.allocator` simulates it without
  expandable segments; states are made once and leave no gaps, so it is a share of all else.

The CUDA context and what the driver keeps are no part of it: they are taken from the capacity. There is no NCCL in one
process. A limit that was given is a limit of what tensors take, and is held against the peak alone. CPU lanes have no
range: their peaks were within 0.4% of the allocator's for transformers, 4% for others (``benchmarks/memory_pipe.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

ESTIMATED_SHARE = 0.1
"""Of what is no state, where operations are estimates."""


@dataclass(frozen=True)
class PeakRange:
    """The least and the most that a device's peak may come out as."""

    low_bytes: int
    high_bytes: int


def peak_range(
    peak_bytes: int,
    *,
    states_bytes: int,
    workspace_bytes: int,
    lists_bytes: int = 0,
    guessed_bytes: int = 0,
    estimated: bool = False,
    fragments: float = 0.0,
) -> PeakRange:
    """Return between which bytes a CUDA device's peak comes out.

    Args:
        peak_bytes: of all tensors, predicted.
        states_bytes: what of it is there before the step: parameters, buffers, optimizer state.
        workspace_bytes: what cuBLAS keeps per handle.
        lists_bytes: by how much the peak would be lower if the optimizer's step held nothing beside its state.
        guessed_bytes: the most scratch of one kernel that is a guess.
        estimated: operations of the device did not run on fake tensors.
        fragments: what the allocator reserves beyond what is asked for, as a share of what is no state.
    """
    moving = max(0, peak_bytes - states_bytes)
    more = fragments + (ESTIMATED_SHARE if estimated else 0.0)
    return PeakRange(
        low_bytes=min(peak_bytes, max(states_bytes, peak_bytes - lists_bytes - guessed_bytes)),
        high_bytes=peak_bytes + guessed_bytes + round(more * moving) + 2 * workspace_bytes,
    )
