"""How much every stage of a plan holds, and between which bytes a device's peak may come out.

A stage's nodes are traced on fake tensors, and the schedule's actions replayed over that. The range is what no trace of
tensors tells, and by how much that can be wrong:

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

The CUDA context and what the driver keeps are no part of it: they are taken from the capacity, and between processes so
is what NCCL keeps (:mod:`cost_models.communicators`). A limit that was given is a limit of what tensors take, and is
held against the peak alone. CPU lanes have no range: their peaks were within 0.4% of the allocator's for transformers,
4% for others (``benchmarks/memory_pipe.py``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch
from torch import fx

from autosplit.checks import MASTERS
from autosplit.optimizers import BATCH_ELEMENTS
from autosplit.options import Options
from autosplit.parallel import largest_bucket
from autosplit.planning.profiled.formulate import held_copies, state_bytes
from autosplit.profile.stage_trace.stage_graph import StageNodes, block_paths
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.profile.stage_trace.trace_memo import TraceMemo
from autosplit.profile.types import Profile, StateProfile
from autosplit.profile.workspaces import cublas_workspace_bytes
from autosplit.progress import phase
from autosplit.schedule.action import Schedule
from autosplit.schedule.memory.allocator import device_changes, simulate_allocator
from autosplit.schedule.memory.pieces import Change, RankParts, Recompute, StageTraces
from autosplit.schedule.memory.replay import DeviceReplay, StaticBytes, optimizer_changes, replay
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.recording.draw_rules import drawn_bytes, is_drawn_beforehand

ESTIMATED_SHARE = 0.1
"""Of what is no state, where operations are estimates."""
_MOST_CHANGES = 200_000
"""How many changes of a step are played through the simulated allocator."""


@dataclass(frozen=True)
class Cut:
    """A recording that was cut into stages, and the microbatches that run through them."""

    traced: TracedGraph
    profile: Profile
    options: Options
    stage_of: Mapping[str, int]
    sizes: tuple[int, ...]
    schedule: Schedule
    recompute: tuple[Recompute, ...]
    blocks: Mapping[str, int] = field(default_factory=dict)
    """The numbers of the repeated blocks that nodes lie in."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""
        return tuple(self.options.devices[lane] for lane in self.schedule.stage_lane)

    @cached_property
    def nodes(self) -> Mapping[int, tuple[TracedNode, ...]]:
        """The nodes of each stage that run for every microbatch, in model order."""
        of_stage: dict[int, list[TracedNode]] = {}
        for _, info in self.traced.compute_nodes():
            if info.node_class is NodeClass.MICRO:
                of_stage.setdefault(self.stage_of[info.name], []).append(info)
        return {stage: tuple(infos) for stage, infos in of_stage.items()}

    @cached_property
    def homes(self) -> tuple[tuple[StateProfile, int], ...]:
        """Every parameter and buffer, with the stage on which it lies: the first that uses it."""
        states = self.profile.state.values()
        return tuple((state, min((self.stage_of[name] for name in state.uses), default=0)) for state in states)

    @cached_property
    def states(self) -> Mapping[int, tuple[StateProfile, ...]]:
        """The parameters and buffers that lie on each stage."""
        of_stage: dict[int, list[StateProfile]] = {}
        for state, home in self.homes:
            of_stage.setdefault(home, []).append(state)
        return {stage: tuple(states) for stage, states in of_stage.items()}

    @cached_property
    def copies(self) -> Mapping[int, int]:
        """Bytes of tied parameters that a stage holds a copy of."""
        places = [self.options.places[lane] for lane in self.schedule.stage_lane]
        return held_copies(self.traced, self.profile, places, self.stage_of)

    @cached_property
    def flows(self) -> Mapping[str, bool]:
        """Whether gradients flow back through values."""
        return {**{name: node.requires_grad for name, node in self.profile.nodes.items()}, **self.profile.input_grads}

    def averaged(self, first: fx.Node | None) -> str | None:
        """Return the model's ``first`` output where the last stage makes it and nothing else takes it.

        Its mean is then made there.
        """
        if first is None or self.stage_of.get(first.meta[INFO].name) != self.schedule.stages - 1:
            return None
        name: str = first.meta[INFO].name
        return name if all(user.op == "output" for user in first.users) else None


@dataclass(frozen=True)
class ReplayedStage:
    """What a stage's microbatches do, and what it holds beside them."""

    traces: StageTraces
    static: StaticBytes


@phase("replaying memory")
def fullest_moments(cut: Cut, *, memo: TraceMemo | None = None) -> tuple[DeviceReplay, ...]:
    """Return what each device holds over one training step, the optimizer's among it.

    ``memo`` holds what was traced for other cuts of the same recording, and takes what is traced now. Raises whatever a
    node raises on fake tensors.
    """
    schedule, memo = cut.schedule, memo or TraceMemo(cut.traced)
    stages = {stage: _replayed(cut, stage, memo) for stage in range(schedule.stages)}
    traces = {stage: replayed.traces for stage, replayed in stages.items()}
    finish = {lane: finish_of(cut, lane) for lane in range(len(schedule.lanes))}
    return replay(schedule, traces, [replayed.static for replayed in stages.values()], finish=finish)


def _replayed(cut: Cut, stage: int, memo: TraceMemo) -> ReplayedStage:
    """Return what is replayed of a stage: its microbatches, under "except_last" of both kinds."""
    nodes = memo.stages.of([info.name for info in cut.nodes.get(stage, ())])
    first, option = memo.stages.first_output, cut.recompute[stage]
    never = How(
        cut.sizes[0],
        input_grads=cut.flows,
        roots=_roots(nodes, first),
        averaged=cut.averaged(first),
        loss=cut.options.loss,
        apart=True,
        kernels="cuda" if cut.devices[stage].type == "cuda" else "cpu",
        observed=cut.profile.times.workspaces if str(cut.devices[stage]) == cut.profile.times.device else None,
    )
    units = block_paths(nodes.root, (info.module for _, info in nodes.computing())) if option == "block" else ()
    traces = memo.traces(
        nodes,
        option,
        never=never if option in ("never", "except_last") else None,
        recomputed=None if option == "never" else replace(never, units=units, whole=not units),
        parts=_parts(cut, nodes),
    )
    return ReplayedStage(traces, _static(cut, stage, nodes))


def _parts(cut: Cut, nodes: StageNodes) -> RankParts | None:
    """Return a rank's share of a stage's storages; None if it has all of them."""
    parallel, shares = cut.options.parallel, cut.profile.shares
    if parallel.ranks == parallel.pp and not parallel.sum_bytes:
        return None
    ends = (node.meta[INFO].name for node in (*nodes.inputs, *nodes.outputs) if INFO in node.meta)
    border = min((shares.of(name).held for name in ends), default=1.0)  # of the loss too: it is the output's
    held = {name: share.held for name, share in shares.nodes.items()}
    work = {name: share.work for name, share in shares.nodes.items()}
    trained = [state for states in cut.states.values() for state in states if state.is_parameter and state.trainable]
    wider = sum(map(parallel.kept_of, trained)) / sum(state.bytes for state in trained) if trained else 1.0
    whole = {  # twice: as it comes in, and put together
        name: 2 * round(cut.profile.nodes[share.whole].output_bytes / shares.of(share.whole).held)
        for name, share in shares.nodes.items()
        if share.whole
    }
    return RankParts(held, work, shares.states, border, wider / parallel.dp if parallel.scatters else wider, whole)


def _gathered(cut: Cut, stage: int) -> int:
    """Return what a stage holds of parameters and gradients that are whole for a while: of its largest block.

    Under ZeRO-3 there are the parameters of the block that runs and of the next, and gradients of two blocks: some are
    made while others are scattered. Under ZeRO-2 there are one block's gradients.
    """
    parallel, blocks = cut.options.parallel, cut.blocks
    if not parallel.scatters:
        return 0
    largest: Counter[int] = Counter()
    summed: Counter[int] = Counter()
    for state in cut.states.get(stage, ()):
        block = next((blocks[name] for name in state.uses if name in blocks), -1)
        largest[block] += state.bytes * state.is_parameter
        summed[block] += parallel.sum_of(state) * state.is_parameter
    count = 2 if parallel.zero == 3 else 0
    ordered, sums = (sorted(each.values(), reverse=True) for each in (largest, summed))
    return sum(ordered[:count]) + sum(sums[: max(count, 1)])


def _roots(nodes: StageNodes, first: fx.Node | None) -> frozenset[str]:
    """Return the values of a stage that gradients come back for.

    Those that other nodes take, and the ``first`` of the model's outputs: a plan without a loss takes the mean of it.
    """
    taken = (node for node in nodes.outputs if node is first or any(user.op != "output" for user in node.users))
    return frozenset(node.meta[INFO].name for node in taken)


def _static(cut: Cut, stage: int, nodes: StageNodes) -> StaticBytes:
    states = cut.states.get(stage, ())
    taken = [node.meta[INFO] for node in nodes.inputs]
    shared = [info for info in taken if info.node_class is NodeClass.SHARED and info.name in cut.profile.nodes]
    outputs = tuple(cut.profile.nodes[info.name].output_bytes for info in shared)
    epilogue = _epilogue(cut) if stage == cut.schedule.stages - 1 else ()
    parameters = sum(state_bytes(state, cut.options).tensor for state in states)
    return StaticBytes(
        parameters=(parameters + cut.copies.get(stage, 0) + _gathered(cut, stage),),
        optimizer=(sum(state_bytes(state, cut.options).optimizer for state in states),),
        whole_batch=(*outputs, *_drawn(cut, stage), *epilogue),
    )


def _drawn(cut: Cut, stage: int) -> tuple[int, ...]:
    """Return the bytes of what a stage's random nodes draw beforehand, for the whole batch."""
    if cut.options.rng != "plain":
        return ()
    taken = (info for info in cut.nodes.get(stage, ()) if info.random and is_drawn_beforehand(info))
    return tuple(drawn_bytes(info, rows=sum(cut.sizes)) for info in taken)


def finish_of(cut: Cut, lane: int) -> tuple[Change, ...]:
    """Return what is allocated behind the last action of a device; empty for an evaluation.

    Replicas add up gradients a bucket at a time, those of shards one at a time where no backward has scattered them.
    Then the optimizer steps as torch does by default.
    """
    if not cut.schedule.has_backward:
        return ()
    stages, options = cut.schedule.stages_on(lane), cut.options
    trained = [s for s, home in cut.homes if home in stages and s.trainable and s.elements]
    summed = options.parallel.dp > 1 or any(len(cut.schedule.lanes_of(stage)) > 1 for stage in stages)
    parallel, sizes = options.parallel, list(map(options.parallel.sum_of, trained))
    sizes = sizes if summed and not parallel.scatters else []
    bucket = max(sizes, default=0) if parallel.whole and not parallel.rules.beside else largest_bucket(sizes)
    updated = [options.updated_bytes(elements=s.elements, parameter_bytes=s.bytes) for s in trained]
    changes = optimizer_changes(
        updated,
        name=options.optimizer,
        foreach=options.devices[lane].type != "cpu",
        masters_bytes=4 * BATCH_ELEMENTS if options.precision in MASTERS else None,
    )
    return ((-1, bucket), (-1, -bucket), *changes) if bucket else changes


def _epilogue(cut: Cut) -> tuple[int, ...]:
    """Return the bytes of what the nodes that mix rows save and make, and of the worst of their transients."""
    infos = (info for _, info in cut.traced.compute_nodes() if info.node_class is NodeClass.FULL)
    nodes = [cut.profile.nodes[info.name] for info in infos]
    held: dict[int, int] = {}
    for node in nodes:
        held |= {**node.saved, **node.outputs}
    transients = (max(node.forward_transient_bytes, node.backward_transient_bytes) for node in nodes)
    return tuple(filter(None, (*held.values(), max(transients, default=0))))


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
    """Return the range in which a CUDA device's peak lies.

    Args:
        peak_bytes: the predicted peak of all tensors.
        states_bytes: the share of it that exists before the step: parameters, buffers, optimizer state.
        workspace_bytes: what cuBLAS keeps per handle.
        lists_bytes: how much lower the peak would be if the optimizer's step allocated nothing beside its state.
        guessed_bytes: the largest scratch of one kernel that is a guess.
        estimated: whether operations of the device did not run on fake tensors.
        fragments: what the allocator reserves beyond what is requested, relative to the bytes that are not state.
    """
    moving = max(0, peak_bytes - states_bytes)
    more = fragments + (ESTIMATED_SHARE if estimated else 0.0)
    return PeakRange(
        low_bytes=min(peak_bytes, max(states_bytes, peak_bytes - lists_bytes - guessed_bytes)),
        high_bytes=peak_bytes + guessed_bytes + round(more * moving) + 2 * workspace_bytes,
    )


def peak_ranges(cut: Cut, fullest: Sequence[DeviceReplay], *, memo: TraceMemo) -> Mapping[int, PeakRange]:
    """Return the range of each device's peak, by lane, for CUDA devices whose own memory is the limit.

    The share of fragments is that of the device with the largest peak, taken for all.
    """
    options = cut.options
    lanes = [lane for lane in range(len(fullest)) if options.devices[lane].type == "cuda"]
    if not lanes or options.memory_limit is not None:
        return {}
    share = _fragments(cut, memo, max(lanes, key=lambda lane: fullest[lane].peak_bytes))
    guessed = {cut.stage_of[name] for name in cut.profile.estimated if name in cut.stage_of}
    estimated = {lane for stage in guessed for lane in cut.schedule.lanes_of(stage)}
    return {
        lane: peak_range(
            fullest[lane].peak_bytes,
            states_bytes=sum(fullest[lane].of(stage, "parameters", "optimizer") for stage in fullest[lane].held),
            workspace_bytes=_workspace_bytes(options, lane),
            lists_bytes=_lists_bytes(fullest[lane]),
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
    """Return a device's compute capability; (0, 0), which means a small workspace, if it has none, as AMD's."""
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
    on_device = cut.schedule.stages_on(lane)
    stages = {stage: _replayed(short, stage, memo) for stage in on_device}
    finish = finish_of(short, lane)
    traces = {stage: replayed.traces for stage, replayed in stages.items()}
    static = [stages[n].static if n in stages else StaticBytes() for n in range(cut.schedule.stages)]
    changes = device_changes(short.schedule, traces, static, device=lane, finishes=(finish, finish))
    simulated = simulate_allocator(islice(changes, _MOST_CHANGES))
    states = sum(sum(stages[stage].static.parameters) + sum(stages[stage].static.optimizer) for stage in on_device)
    moving = simulated.requested_peak_bytes - states
    return max(0, simulated.reserved_peak_bytes - simulated.requested_peak_bytes) / moving if moving > 0 else 0.0
