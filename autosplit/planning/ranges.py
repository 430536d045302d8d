"""The ranges of a plan's peaks: which devices have one, and what goes into it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch

from autosplit.memory.allocator import simulate_allocator
from autosplit.memory.play import device_changes
from autosplit.memory.range import PeakRange, peak_range
from autosplit.memory.replay import StaticBytes
from autosplit.options import Options
from autosplit.planning.memory import Cut, DevicePeak, finish_of, replayed_stages
from autosplit.profile.stage_trace.trace_memo import TraceMemo
from autosplit.profile.workspaces.workspaces import cublas_workspace_bytes

_FUSED = ("adam", "adamw", "sgd", "momentum")
"""Optimizers of torch's that have an implementation in one kernel, for CUDA."""
_MOST_CHANGES = 200_000
"""How many changes of a step are played through the simulated allocator."""


def peak_ranges(cut: Cut, fullest: Sequence[DevicePeak], *, memo: TraceMemo) -> Mapping[int, PeakRange]:
    """Return the range of each device's peak, by lane, for CUDA devices whose own memory is the limit.

    The share of fragments is that of the device with the largest peak, taken for all.
    """
    options = cut.options
    lanes = [lane for lane in range(len(fullest)) if _has_range(options, lane)]
    if not lanes:
        return {}
    share = _fragments(cut, memo, max(lanes, key=lambda lane: fullest[lane].peak_bytes))
    estimated = {cut.schedule.stage_lane[cut.stage_of[name]] for name in cut.profile.estimated if name in cut.stage_of}
    return {
        lane: peak_range(
            fullest[lane].peak_bytes,
            states_bytes=_states_bytes(fullest[lane]),
            workspace_bytes=_workspace_bytes(options, lane),
            lists_bytes=_lists_bytes(fullest[lane], options),
            guessed_bytes=fullest[lane].guessed_bytes,
            estimated=lane in estimated,
            fragments=share,
        )
        for lane in lanes
    }


def _has_range(options: Options, lane: int) -> bool:
    return options.memory_limit is None and options.devices[lane].type == "cuda"


def _states_bytes(device: DevicePeak) -> int:
    return sum(device.of(stage, "parameters", "optimizer") for stage in device.held)


def _lists_bytes(device: DevicePeak, options: Options) -> int:
    """Return by how much a device's peak is above what it would be with a fused optimizer."""
    if device.moment.action is not None or options.optimizer not in _FUSED:
        return 0
    *before, update = device.over_step
    most = max((sum(moment.values()) for moment in before), default=0)
    return device.moment.total_bytes - max(most, sum(update.values()) - update.get("transient", 0))


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
