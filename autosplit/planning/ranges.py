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

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from autosplit.memory.allocator import device_changes, simulate_allocator
from autosplit.memory.replay import DeviceReplay, StaticBytes
from autosplit.options import Options
from autosplit.planning.memory import Cut, DevicePeak, finish_of, replayed_stages
from autosplit.profile.stage_trace.trace_memo import TraceMemo
from autosplit.profile.workspaces import cublas_workspace_bytes

ESTIMATED_SHARE = 0.1
"""Of what is no state, where operations are estimates."""
_MOST_CHANGES = 200_000
"""How many changes of a step are played through the simulated allocator."""


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


def peak_ranges(cut: Cut, fullest: Sequence[DevicePeak], *, memo: TraceMemo) -> Mapping[int, PeakRange]:
    """Return the range of each device's peak, by lane, for CUDA devices whose own memory is the limit.

    The share of fragments is that of the device with the largest peak, taken for all.
    """
    options = cut.options
    lanes = [lane for lane in range(len(fullest)) if options.devices[lane].type == "cuda"]
    if not lanes or options.memory_limit is not None:
        return {}
    share = _fragments(cut, memo, max(lanes, key=lambda lane: fullest[lane].peak_bytes))
    estimated = {cut.schedule.stage_lane[cut.stage_of[name]] for name in cut.profile.estimated if name in cut.stage_of}
    return {
        lane: peak_range(
            fullest[lane].peak_bytes,
            states_bytes=sum(fullest[lane].of(stage, "parameters", "optimizer") for stage in fullest[lane].step.held),
            workspace_bytes=_workspace_bytes(options, lane),
            lists_bytes=_lists_bytes(fullest[lane].step),
            guessed_bytes=fullest[lane].guessed_bytes,
            estimated=lane in estimated,
            fragments=share,
        )
        for lane in lanes
    }


def _lists_bytes(device: DeviceReplay) -> int:
    """Return by how much a device's peak is above what it would be with a fused optimizer."""
    *before, last = device.moments
    if device.peak.action is not None:
        return 0
    most = max((moment.total_bytes for moment in before), default=0)
    return last.total_bytes - max(most, last.total_bytes - last.bytes.get("transient", 0))


def _capability(options: Options, lane: int) -> tuple[int, int]:
    """Return a device's compute capability; of one that has none, as AMD's, that of a small workspace."""
    if options.machine is None:
        return torch.cuda.get_device_capability(options.devices[lane])
    major, _, minor = (options.machine.devices[lane].compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _workspace_bytes(options: Options, lane: int) -> int:
    """Return what cuBLAS keeps per handle; a device that is here is set by the environment, as cuBLAS itself is."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG") if options.machine is None else None
    return cublas_workspace_bytes(_capability(options, lane), config=config)


def _fragments(cut: Cut, memo: TraceMemo, lane: int) -> float:
    """Return what the allocator reserves beyond what a device asks for, as a share of what is no state.

    Two steps of a few microbatches more than there are stages: later ones do the same again.
    """
    few = 2 * len(cut.schedule.lanes) + 2
    lanes = tuple(tuple(a for a in actions if a.microbatch < few) for actions in cut.schedule.lanes)
    short = replace(cut, schedule=replace(cut.schedule, lanes=lanes), sizes=cut.sizes[:few])
    own = cut.schedule.stages_on(lane)
    stages = replayed_stages(short, memo=memo, stages=own)
    finish = finish_of(short, lane)
    traces = {stage: found.traces for stage, found in stages.items()}
    static = [stages[n].static if n in stages else StaticBytes() for n in range(cut.schedule.stages)]
    changes = device_changes(short.schedule, traces, static, device=lane, finishes=(finish, finish))
    found = simulate_allocator(islice(changes, _MOST_CHANGES))
    states = sum(sum(stages[stage].static.parameters) + sum(stages[stage].static.optimizer) for stage in own)
    moving = found.requested_peak_bytes - states
    return max(0, found.reserved_peak_bytes - found.requested_peak_bytes) / moving if moving > 0 else 0.0
