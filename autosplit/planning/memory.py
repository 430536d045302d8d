"""How much every stage of a plan holds: its nodes traced on fake tensors, the schedule's actions replayed over that."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch
from torch import fx

from autosplit.memory.allocator import device_changes, simulate_allocator
from autosplit.memory.events import Step
from autosplit.memory.pieces import MemoryKind, Recompute, StageTraces
from autosplit.memory.range import PeakRange, peak_range
from autosplit.memory.replay import Moment, StaticBytes, replay
from autosplit.memory.state import Optimizer, Precision, optimizer_steps, parameter_bytes
from autosplit.options import Options
from autosplit.planning.profiled.formulate import held_copies, state_bytes
from autosplit.profile.stage_trace.stage_graph import StageNodes
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.profile.stage_trace.trace_memo import Known, TraceMemo, Wanted
from autosplit.profile.types import Profile, StateProfile
from autosplit.profile.workspaces import cublas_workspace_bytes
from autosplit.progress import phase
from autosplit.schedule.action import Schedule
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.recording.draw_rules import drawn_bytes, is_drawn_beforehand


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

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""
        return tuple(self.options.devices[lane] for lane in self.schedule.stage_lane)

    @cached_property
    def nodes(self) -> Mapping[int, tuple[TracedNode, ...]]:
        """The nodes of each stage that run for every microbatch, in model order."""
        found: dict[int, list[TracedNode]] = {}
        for _, info in self.traced.compute_nodes():
            if info.node_class is NodeClass.MICRO:
                found.setdefault(self.stage_of[info.name], []).append(info)
        return {stage: tuple(own) for stage, own in found.items()}

    @cached_property
    def homes(self) -> tuple[tuple[StateProfile, int], ...]:
        """Every parameter and buffer, with the stage on which it lies: the first that uses it."""
        states = self.profile.state.values()
        return tuple((state, min((self.stage_of[name] for name in state.uses), default=0)) for state in states)

    @cached_property
    def states(self) -> Mapping[int, tuple[StateProfile, ...]]:
        """The parameters and buffers that lie on each stage."""
        found: dict[int, list[StateProfile]] = {}
        for state, home in self.homes:
            found.setdefault(home, []).append(state)
        return {stage: tuple(own) for stage, own in found.items()}

    @cached_property
    def copies(self) -> Mapping[int, int]:
        """Bytes of tied parameters that a stage holds a copy of."""
        return held_copies(self.traced, self.profile, self.devices, self.stage_of)

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
class DevicePeak:
    """A device at the moment of the step at which it holds the most."""

    moment: Moment
    held: Mapping[int, Mapping[MemoryKind, int]]
    """What each of its stages holds then."""
    epilogue_bytes: int
    """What the nodes that run once per step, on the whole batch, add on the last stage's device."""
    over_step: tuple[Mapping[MemoryKind, int], ...] = ()
    """What the device holds at the fullest moment of each action, and of the optimizer's step where there is one."""
    left: Mapping[MemoryKind, int] = field(default_factory=dict)
    """What it holds when the step ends."""
    guessed_bytes: int = 0
    """The most scratch of one kernel that nobody measured."""

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.moment.total_bytes + self.epilogue_bytes

    @property
    def running(self) -> int:
        """The stage whose action runs then; in the optimizer's step the device's first."""
        return min(self.held) if self.moment.action is None else self.moment.action.stage

    def of(self, stage: int, *kinds: MemoryKind) -> int:
        """Return the bytes of some kinds that a stage holds."""
        return sum(self.held[stage].get(kind, 0) for kind in kinds)


@dataclass(frozen=True)
class ReplayedStage:
    """A stage's traces, what its nodes are called, and what it holds beside its microbatches."""

    known: Known
    names: tuple[str, ...]
    static: StaticBytes

    @property
    def traces(self) -> StageTraces:
        """What its microbatches do."""
        return self.known.traces


@phase("replaying memory")
def fullest_moments(cut: Cut, *, memo: TraceMemo | None = None) -> tuple[DevicePeak, ...]:
    """Return each device's fullest moment in one training step, the optimizer's among them.

    ``memo`` holds what was traced for other cuts of the same recording, and takes what is traced now. Raises whatever a
    node raises on fake tensors.
    """
    schedule = cut.schedule
    stages = replayed_stages(cut, memo=memo or TraceMemo(), stages=range(schedule.stages))
    traces = {stage: own.traces for stage, own in stages.items()}
    finish = {lane: finish_of(cut, lane) for lane in range(len(schedule.lanes))}
    found = replay(schedule, traces, [own.static for own in stages.values()], finish=finish)
    last, epilogue = schedule.stage_lane[-1], _epilogue_bytes(cut)
    return tuple(
        DevicePeak(
            _called(device.peak, stages),
            device.held,
            epilogue if lane == last else 0,
            tuple(entry.peak.bytes for entry in device.actions),
            device.actions[-1].left,
            max((stages[stage].traces.guessed_bytes for stage in device.held), default=0),
        )
        for lane, device in enumerate(found.devices)
    )


def replayed_stages(cut: Cut, *, memo: TraceMemo, stages: Iterable[int]) -> dict[int, ReplayedStage]:
    """Return what is replayed of some stages."""
    graphs = memo.graphs(cut.traced)
    nodes = {stage: graphs.nodes([info.name for info in cut.nodes.get(stage, ())]) for stage in stages}
    wanted = {stage: _wanted(cut, stage, own, memo) for stage, own in nodes.items()}
    return {
        stage: ReplayedStage(known, wanted[stage].names, _static(cut, stage, nodes[stage]))
        for stage, known in zip(wanted, memo.traces(wanted.values()), strict=True)
    }


def _called(moment: Moment, stages: Mapping[int, ReplayedStage]) -> Moment:
    """Return a moment with its node's name in the stage whose action runs."""
    if moment.action is None:
        return moment
    own = stages[moment.action.stage]
    return replace(moment, node=own.known.node(moment.node, own.names))


def _wanted(cut: Cut, stage: int, nodes: StageNodes, memo: TraceMemo) -> Wanted:
    """Return what is to be traced of a stage's microbatches, under "except_last" of both kinds."""
    option = cut.recompute[stage]
    units = memo.blocks(nodes) if option == "block" else ()
    return memo.wanted(
        nodes,
        option,
        never=_how(cut, stage, nodes) if option in ("never", "except_last") else None,
        recomputed=None if option == "never" else _how(cut, stage, nodes, units=units, whole=not units),
    )


def _how(cut: Cut, stage: int, nodes: StageNodes, *, units: tuple[str, ...] = (), whole: bool = False) -> How:
    first = nodes.graphs.first_output
    return How(
        cut.sizes[0],
        input_grads=cut.flows,
        roots=_roots(nodes, first),
        averaged=cut.averaged(first),
        loss=cut.options.loss,
        apart=True,
        units=units,
        whole=whole,
        kernels="cuda" if cut.devices[stage].type == "cuda" else "cpu",
        observed=cut.profile.workspaces if str(cut.devices[stage]) == cut.profile.device else None,
    )


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
    return StaticBytes(
        parameters=(sum(state.bytes for state in states) + cut.copies.get(stage, 0),),
        optimizer=(sum(state_bytes(state, cut.options).optimizer for state in states),),
        whole_batch=(*(cut.profile.nodes[info.name].output_bytes for info in shared), *_drawn(cut, stage)),
    )


def _drawn(cut: Cut, stage: int) -> tuple[int, ...]:
    """Return the bytes of what a stage's random nodes draw beforehand, for the whole batch."""
    if cut.options.rng != "plain":
        return ()
    taken = (info for info in cut.nodes.get(stage, ()) if info.random and is_drawn_beforehand(info))
    return tuple(drawn_bytes(info, rows=sum(cut.sizes)) for info in taken)


def finish_of(cut: Cut, lane: int) -> tuple[Step, ...]:
    """Return what the optimizer allocates in its step on a device, as torch does by default; where there is a step."""
    if not cut.schedule.has_backward:
        return ()
    on_cpu = cut.options.devices[lane].type == "cpu"
    optimizer = Optimizer(cut.options.optimizer, "forloop" if on_cpu else "foreach")
    masters: Precision | None = "bf16_fp32_master" if cut.options.precision == "bf16_fp32_master" else None
    own = cut.schedule.stages_on(lane)
    sizes = [
        parameter_bytes(s.elements, element_bytes=s.bytes // s.elements, optimizer=optimizer, precision=masters)
        for s, home in cut.homes
        if home in own and s.trainable and s.elements
    ]
    return optimizer_steps(sizes, optimizer=optimizer, first=False, on_cpu=on_cpu)


def _epilogue_bytes(cut: Cut) -> int:
    """Return what the nodes that mix rows save and make, and the worst of their transients."""
    infos = (info for _, info in cut.traced.compute_nodes() if info.node_class is NodeClass.FULL)
    nodes = [cut.profile.nodes[info.name] for info in infos]
    held: dict[int, int] = {}
    for node in nodes:
        held |= {**node.saved, **node.outputs}
    return sum(held.values()) + max(
        (max(n.forward_transient_bytes, n.backward_transient_bytes) for n in nodes), default=0
    )


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
