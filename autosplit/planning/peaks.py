"""Between which bytes a CUDA device's peak comes out, item by item, and the chance that a capacity holds it.

```
    items     tensors ──┤replayed├──   fragments ├────────┤   gradients in fp32 ├───┤   …     low to high each
    the sum                          ├───── 5% ═════════════ 95% ─────┤                      low_bytes to high_bytes
```

Each item is uniform from its low to its high and independent of the others; the sum is taken as normal, with the sum of
their means and of their variances. Between ``low_bytes`` and ``high_bytes`` it lies nine times in ten. In a choice
programs of one runtime differ: all are their least for the low end, and their most for the high one.

What a limit that was given is held against is the peak of tensors alone. CPU lanes have no range: their peaks were
within 0.4% of the allocator's for transformers, 4% for others (``benchmarks/memory_pipe.py``). How the widths were
chosen: ``docs/decisions/19-memory.md``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from autosplit.checks import MASTERS
from autosplit.options import Options
from autosplit.planning.memory import Cut, finish_of, replayed_stage
from autosplit.planning.plan.fields import CERTAIN, MemoryItem
from autosplit.profile.stage_trace.trace_memo import TraceMemo
from autosplit.profile.workspaces import cublas_workspace_bytes
from autosplit.schedule.memory.allocator import device_changes, simulate_allocator
from autosplit.schedule.memory.replay import DeviceReplay, StaticBytes

_MIB = 2**20
_MOST_CHANGES = 200_000
"""How many changes of a step are played through the simulated allocator."""
_REPLAYED_SHARE = 0.03
"""Of what is no state: 27 of 32 peaks of allocated memory on an H100 came out as near (results/memory-h100.json)."""
_ESTIMATED_SHARE = 0.1
"""Of what is no state, where operations did not run on fake tensors."""
_FRAGMENTS_SHARE = {"default": 0.15, "expandable": 0.05}
"""Of what is no state, beyond the simulated allocator, by its setting: it has one stream, and replays two steps.

With the simulation's own they cover what torchtitan reserved for Llama 3.1 70B (``decisions/19-memory.md``).
"""
_LOGITS_BYTES = 10
"""Per word of logits that are whole on every rank: in bf16, their fp32 copy, and its log-softmax or gradient."""
_CHOICES = ("gradients in fp32", "whole logits")
_CONTEXT = (-150 * _MIB, 500 * _MIB)
"""Around the one context that a device's usable memory is without: 300 to 600 MiB, and libraries' kernels."""


@dataclass(frozen=True)
class PeakRange:
    """Between what a device's peak comes out nine times in ten, and what that is made of."""

    low_bytes: int
    high_bytes: int
    items: tuple[MemoryItem, ...] = ()

    @classmethod
    def of(cls, items: Iterable[MemoryItem]) -> PeakRange:
        """Return the range of the sum of independent items."""
        kept = tuple(items)
        chances = [item for item in kept if not item.choice]
        middle = sum(item.low_bytes + item.high_bytes for item in chances) / 2
        half = CERTAIN * math.hypot(*(item.high_bytes - item.low_bytes for item in chances)) / math.sqrt(12)
        low = round(middle - half) + sum(item.low_bytes for item in kept if item.choice)
        high = round(middle + half) + sum(item.high_bytes for item in kept if item.choice)
        return cls(max(0, low), max(0, high), kept)

    def above(self, waiting: int) -> PeakRange:
        """Return the range with the bytes of messages that wait."""
        item = MemoryItem(
            name="messages", low_bytes=waiting, high_bytes=waiting, source="on their way between processes"
        )
        return PeakRange.of((*self.items, item)) if waiting else self


def peak_ranges(cut: Cut, fullest: Sequence[DeviceReplay], *, memo: TraceMemo) -> Mapping[int, PeakRange]:
    """Return the range of each device's peak, by lane, for CUDA devices whose own memory is the limit.

    The share of fragments is that of the device with the largest peak, taken for all.
    """
    options = cut.options
    every = range(len(fullest))
    lanes = [lane for lane in every if options.devices[lane].type == "cuda" and options.limit_of(lane) is None]
    if not lanes:
        return {}
    share = 0.0
    if options.allocator == "default":
        share = _fragments(cut, memo, max(lanes, key=lambda lane: fullest[lane].peak_bytes))
    return {lane: PeakRange.of(_items(cut, lane, fullest[lane], share=share)) for lane in lanes}


def _items(cut: Cut, lane: int, device: DeviceReplay, *, share: float) -> Iterator[MemoryItem]:
    """Yield what a device's peak is made of; ``share``: of what is no state, what the simulated allocator adds."""
    options, stages = cut.options, cut.schedule.stages_on(lane)
    states = sum(device.of(stage, "parameters", "optimizer") for stage in device.held)
    moving = max(0, device.peak_bytes - states)
    more = round(_FRAGMENTS_SHARE[options.allocator] * moving)
    items: dict[str, tuple[int, int, str]] = {
        "tensors": (device.peak_bytes, device.peak_bytes, "replayed on fake tensors"),
        "replay": (*_around(_REPLAYED_SHARE * moving), "its error on an H100"),
        "optimizer's lists": (-_lists_bytes(device), 0, "none where the optimizer is fused"),
        "scratch": (*_around(device.guessed_bytes), "of kernels that nobody measured"),
        "estimates": (0, _estimated(cut, lane, moving), "operations that do not run on fake tensors"),
        "cuBLAS": (0, 2 * _workspace_bytes(options, lane), "a workspace for each of two threads"),
        "fragments": (0, round(share * moving) + more, f"simulated allocator, {options.allocator} segments"),
        "gradients in fp32": (*_fp32_gradients(cut, lane, device), "kept through the step, or copied for the update"),
        "whole logits": (0, _logits_bytes(cut) if cut.schedule.stages - 1 in stages else 0, "where tp gathers"),
        "NCCL": (*_around(options.neighbours_bytes[lane] / 2), "its defaults, and communicators that are made late"),
        "CUDA context": (*_CONTEXT, "and kernels that libraries load"),
    }
    for name, (low, high, source) in items.items():
        if low or high:
            yield MemoryItem(name=name, low_bytes=low, high_bytes=high, source=source, choice=name in _CHOICES)


def _around(half: float) -> tuple[int, int]:
    return -round(half), round(half)


def _estimated(cut: Cut, lane: int, moving: int) -> int:
    """Return what a device may hold beside the replay where operations of it were estimated."""
    names = (name for name in cut.profile.estimated if name in cut.stage_of)
    return round(_ESTIMATED_SHARE * moving) * any(lane in cut.schedule.lanes_of(cut.stage_of[name]) for name in names)


def _fp32_gradients(cut: Cut, lane: int, device: DeviceReplay) -> tuple[int, int]:
    """Return what gradients in fp32 take beside those in bf16, where the runtime may have either kind.

    They are kept through the step in the place of those in bf16, or copied for the update, a shard of them.
    """
    parallel, homes = cut.options.parallel, cut.schedule.stages_on(lane)
    if not parallel.rules.varies or cut.options.precision not in MASTERS or not cut.schedule.has_backward:
        return 0, 0
    trained = [state for state, home in cut.homes if home in homes and state.trainable]
    shards = {zero: sum(parallel.part_of(each.elements, each, zero=zero) for each in trained) for zero in (1, 2)}
    kept, update = 2 * shards[2], device.moments[-1]
    copied = update.total_bytes - update.bytes.get("transient", 0) + 4 * shards[1]
    least, most = sorted((kept, max(0, copied - device.peak_bytes)))
    return least, most


def _logits_bytes(cut: Cut) -> int:
    """Return how much more logits take that every tensor-parallel rank gathers, where the runtime may do that.

    Logits are the largest floating value of the last stage outside of repeated blocks.
    """
    more = 0
    if not cut.options.parallel.rules.varies:
        return more
    for _, info in cut.traced.compute_nodes():
        value, share = next(iter(info.tensors), None), cut.profile.shares.of(info.name).held
        if value is None or info.name in cut.blocks or not value.dtype.is_floating_point or share == 1.0:
            continue
        if cut.stage_of[info.name] == cut.schedule.stages - 1:
            words = cut.profile.nodes[info.name].output_bytes / value.dtype.itemsize
            more = max(more, round(_LOGITS_BYTES * words * (1 / share - 1)))
    return more


def _lists_bytes(device: DeviceReplay) -> int:
    """Return by how much a device's peak is above what it would be with a fused optimizer."""
    *before, last = device.moments
    if device.peak.action is not None:
        return 0
    most = max((moment.total_bytes for moment in before), default=0)
    return last.total_bytes - max(most, last.total_bytes - last.bytes.get("transient", 0))


def _workspace_bytes(options: Options, lane: int) -> int:
    """Return what cuBLAS keeps per handle; a device that is here is set by the environment, as cuBLAS itself is."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG") if options.machine is None else None
    return cublas_workspace_bytes(_capability(options, lane), config=config)


def _capability(options: Options, lane: int) -> tuple[int, int]:
    """Return a device's compute capability; (0, 0), which means a small workspace, if it has none, as AMD's."""
    if options.machine is None:
        return torch.cuda.get_device_capability(options.devices[lane])
    major, _, minor = (options.machine.devices[lane].compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _fragments(cut: Cut, memo: TraceMemo, lane: int) -> float:
    """Return what the allocator reserves beyond what a device asks for, as a share of what is no state.

    Two steps of a few microbatches more than there are stages: later ones do the same again.
    """
    few = 2 * len(cut.schedule.lanes) + 2
    lanes = tuple(tuple(a for a in actions if a.microbatch < few) for actions in cut.schedule.lanes)
    short = replace(cut, schedule=replace(cut.schedule, lanes=lanes), sizes=cut.sizes[:few])
    on_device = cut.schedule.stages_on(lane)
    stages = {stage: replayed_stage(short, stage, memo) for stage in on_device}
    traces = {stage: replayed.traces for stage, replayed in stages.items()}
    finish = finish_of(short, lane, traces)
    static = [stages[n].static if n in stages else StaticBytes() for n in range(cut.schedule.stages)]
    changes = device_changes(short.schedule, traces, static, device=lane, finishes=(finish, finish))
    simulated = simulate_allocator(islice(changes, _MOST_CHANGES))
    states = sum(sum(stages[stage].static.parameters) + sum(stages[stage].static.optimizer) for stage in on_device)
    moving = simulated.requested_peak_bytes - states
    return max(0, simulated.reserved_peak_bytes - simulated.requested_peak_bytes) / moving if moving > 0 else 0.0
