"""torchgpipe's memory benchmarks predicted: bytes that PyTorch's caching allocator reserves, summed over the devices.

Their scripts (``benchmarks/unet-memory/main.py``, ``benchmarks/amoebanetd-memory/main.py`` of
github.com/kakaobrain/torchgpipe) run two steps without ``zero_grad`` and read ``max_memory_cached``. What is modelled,
read from torchgpipe's source:

    stage      recomputed as a whole for all microbatches but the last, of which only the inputs stay ("except_last")
    order      all forwards, then the backwards, the last microbatch first
    copies     what arrives on a device was allocated on a copy stream, one per device and microbatch (but torch has 32
               per device), and the caching allocator lets no other stream use such memory: each reserves its own
    outputs    of a recomputed microbatch are freed once they are copied; autograd saves none of them

Not counted: the scratch of cuDNN 7's kernels, which is unknown, and how far the host ran ahead of the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.options import Sample
from autosplit.profile.stage_trace.stage_graph import StageNodes, Stages
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.schedule.memory.allocator import simulate_allocator
from autosplit.schedule.memory.pieces import Change, NodeStep, StageTrace
from autosplit.trace.graph import INFO, TracedGraph
from autosplit.trace.ladder import trace
from benchmarks.published_models import Chain, amoebanet, unet

STEPS = 2


@dataclass(frozen=True)
class Experiment:
    """One published run: what is trained, and how many of the chain's layers each device has.

    ``balance`` is empty for the run without torchgpipe, which recomputes nothing.
    """

    make: Callable[[], Chain]
    rows: int
    size: int
    balance: tuple[int, ...] = ()
    chunks: int = 1
    optimizer: Literal["sgd", "rmsprop"] = "sgd"
    classes: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes per element of a parameter, its gradient and the optimizer's state: theirs are called model memory."""
        return 8 if self.optimizer == "sgd" else 12


def _unet(convolutions: int, channels: int, *balance: int, chunks: int = 32) -> Experiment:
    return Experiment(lambda: unet(convolutions=convolutions, channels=channels), 32, 192, balance, chunks)


def _amoebanet(layers: int, filters: int, *balance: int) -> Experiment:
    return Experiment(
        lambda: amoebanet(layers=layers, filters=filters), 128, 224, balance, 128, "rmsprop", classes=True
    )


def experiments() -> Mapping[str, Experiment]:
    """Return the published runs by the name that the table gives them."""
    return {
        "U-Net (6,72)": _unet(6, 72),
        "U-Net (11,128) chunks32 [505]": _unet(11, 128, 505),
        "U-Net (24,128) chunks32 [526,551]": _unet(24, 128, 526, 551),
        "AmoebaNet-D (18,208)": _amoebanet(18, 208),
        "AmoebaNet-D (18,416) [24]": _amoebanet(18, 416, 24),
        "AmoebaNet-D (18,544) [16,8]": _amoebanet(18, 544, 16, 8),
    }


@dataclass(frozen=True)
class Stage:
    """What one device runs, with its parameters.

    Attributes:
        recomputed: the trace of every microbatch but the last.
        last: the trace of the last one, which recomputes nothing.
    """

    recomputed: StageTrace
    last: StageTrace
    parameters: tuple[int, ...]
    output_bytes: int


class _Trained(nn.Module):
    def __init__(self, model: nn.Module, *, classes: bool) -> None:
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        output = self.model(value)
        return F.cross_entropy(output, target) if self.classes else F.binary_cross_entropy_with_logits(output, target)


def stages_of(experiment: Experiment) -> list[Stage]:
    """Return the stages of an experiment; the one without torchgpipe ends with the loss."""
    rows = max(experiment.rows // experiment.chunks, 1) if experiment.balance else experiment.rows
    with torch.device("meta"):
        model: nn.Module = experiment.make().train()
        value = torch.empty(rows, 3, experiment.size, experiment.size)
        target = torch.empty(rows, dtype=torch.long) if experiment.classes else torch.empty(rows, 1, *value.shape[2:])
    if not experiment.balance:
        graph = trace(_Trained(model, classes=experiment.classes), Sample(value, target)).graph
        return [_stage(Stages(graph).of(), rows, first=True)]
    graph = trace(model, Sample(value)).graph
    found, start = [], 0
    for count in experiment.balance:
        names = _names(graph, start, start + count)
        found.append(_stage(Stages(graph).of(names), rows, first=not start))
        start += count
    return found


def _names(graph: TracedGraph, first: int, last: int) -> list[str]:
    """Return the nodes of some layers of the chain."""
    inside = {("layers", str(layer)) for layer in range(first, last)}
    return [info.name for _, info in graph.compute_nodes() if tuple(info.module.split(".")[:2]) in inside]


def _stage(graph: StageNodes, rows: int, *, first: bool) -> Stage:
    wanted = {node.meta[INFO].name: not first for node in graph.inputs}
    recomputed, last = (
        trace_stage(graph, How(rows, input_grads=wanted, whole=whole, kernels="cuda")) for whole in (True, False)
    )
    used = {name for _, info in graph.computing() for name in info.reads}
    parameters = {name: p.numel() * p.element_size() for name, p in graph.root.named_parameters() if name in used}
    outputs = sum(tensor.bytes_at(rows) for node in graph.outputs for tensor in node.meta[INFO].tensors)
    return Stage(recomputed, last, tuple(parameters.values()), outputs)


# -- the allocator's view ----------------------------------------------------------------------------------------------
_Streams = dict[int, list[Change]]
_COMPUTE = -1
_POOL = 32
"""Streams that torch makes per device; further ones are the same again (``c10/cuda/CUDAStream.cpp``)."""


class _Ends:
    """Which storages of a trace are no work of its nodes: what arrives, forward and backward, and the outputs."""

    def __init__(self, trace: StageTrace) -> None:
        self.inputs = {storage for storage, size in _of_none(trace.forward[:1]) if size > 0}
        self.cotangents = {storage for storage, size in _of_none(trace.backward[:1]) if size > 0}
        made = {storage for step in trace.forward for storage, size in step.changes if size > 0}
        freed_last = {storage for storage, size in _of_none(trace.backward[-1:]) if size < 0}
        self.outputs = (made & freed_last) - self.inputs


class Device:
    """One device's allocations over the steps of the script, by stream: the copy stream of a microbatch, or its own."""

    def __init__(self, experiment: Experiment, stage: Stage, *, first: bool, last: bool) -> None:
        self.experiment, self.stage, self.first, self.last = experiment, stage, first, last
        self.chunks = experiment.chunks if experiment.balance else 1
        self.ends = {id(trace): _Ends(trace) for trace in (stage.recomputed, stage.last)}
        self.streams: _Streams = {_COMPUTE: []}
        self.live: dict[tuple[int, int], tuple[int, Change]] = {}
        self.count = 0

    def run(self) -> _Streams:
        """Play all steps; return the changes of each stream."""
        for size in self.stage.parameters:
            self.new(size)
        if self.first:
            self.new(4 * 3 * self.experiment.rows * self.experiment.size**2)
        gathers = self.last and self.experiment.balance
        for number in range(STEPS):
            for microbatch in range(self.chunks):
                self.forward(microbatch)
            # The outputs of all microbatches in one tensor, and its gradient.
            whole = [self.new(self.chunks * self.stage.output_bytes) for _ in range(2)] if gathers else []
            for microbatch in reversed(range(self.chunks)):
                trace = self.trace(microbatch)
                fresh = number == 0 and microbatch == self.chunks - 1
                self.play(trace, trace.backward if fresh else trace.backward_later, microbatch)
            for change in whole:
                self.old(change)
            self.optimize(first=number == 0)
        return self.streams

    def trace(self, microbatch: int) -> StageTrace:
        return self.stage.last if microbatch == self.chunks - 1 else self.stage.recomputed

    def forward(self, microbatch: int) -> None:
        trace = self.trace(microbatch)
        self.play(trace, trace.forward, microbatch)
        if trace is self.stage.recomputed:
            for storage in self.ends[id(trace)].outputs:
                self.free(microbatch, storage)

    def play(self, trace: StageTrace, steps: Sequence[NodeStep], microbatch: int) -> None:
        ends = self.ends[id(trace)]
        for step in steps:
            for storage, size in step.changes:
                if size < 0:
                    self.free(microbatch, storage)
                elif storage in ends.inputs:
                    if not self.first:  # else a slice of the batch
                        self.allocate(microbatch, storage, size, stream=microbatch % _POOL)
                elif storage in ends.cotangents and self.experiment.balance:
                    if not self.last:  # else a slice of the whole gradient
                        self.allocate(microbatch, storage, size, stream=microbatch % _POOL)
                else:
                    self.allocate(microbatch, storage, size, stream=_COMPUTE)

    def optimize(self, *, first: bool) -> None:
        """RMSprop as it was in torch 1.3: a parameter's root lives until the next one's is made."""
        if self.experiment.optimizer == "sgd":
            return
        root = None
        for size in self.stage.parameters:
            if first:
                self.new(size)
            previous, root = root, self.new(size)
            if previous is not None:
                self.old(previous)
        if root is not None:
            self.old(root)

    def allocate(self, microbatch: int, storage: int, size: int, *, stream: int) -> None:
        self.live[microbatch, storage] = stream, self.new(size, stream=stream)

    def free(self, microbatch: int, storage: int) -> None:
        stream, change = self.live.pop((microbatch, storage), (_COMPUTE, None))
        if change is not None:
            self.old(change, stream=stream)

    def new(self, size: int, *, stream: int = _COMPUTE) -> Change:
        self.count += 1
        change = self.count, size
        self.streams.setdefault(stream, []).append(change)
        return change

    def old(self, change: Change, *, stream: int = _COMPUTE) -> None:
        self.streams[stream].append((change[0], -change[1]))


def _of_none(steps: Sequence[NodeStep]) -> Iterator[Change]:
    for step in steps:
        if not step.node:
            yield from step.changes


@dataclass(frozen=True)
class Predicted:
    """Bytes over all devices: theirs are ``reserved_bytes``, and that less ``model_bytes`` is their "activation"."""

    parameters: int
    model_bytes: int
    allocated_bytes: int
    reserved_bytes: int


def predicted(experiment: Experiment, stages: list[Stage]) -> Predicted:
    """Return what the devices reserve."""
    allocated = reserved = 0
    for place, stage in enumerate(stages):
        device = Device(experiment, stage, first=not place, last=place == len(stages) - 1)
        for changes in device.run().values():
            found = simulate_allocator(changes)
            allocated += found.allocated_peak_bytes
            reserved += found.reserved_peak_bytes
    parameters = sum(sum(stage.parameters) for stage in stages) // 4
    return Predicted(parameters, parameters * experiment.state_bytes, allocated, reserved)
