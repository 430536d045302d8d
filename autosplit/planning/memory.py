"""How much every stage of a plan holds: its nodes traced on fake tensors, the schedule's actions replayed over that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autosplit.memory.pieces import Change, MemoryKind, Recompute, StageTraces
from autosplit.memory.replay import DeviceReplay, StaticBytes, optimizer_changes, replay
from autosplit.options import Options
from autosplit.planning.profiled.formulate import held_copies, state_bytes
from autosplit.profile.stage_trace.stage_graph import StageNodes
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.profile.stage_trace.trace_memo import TraceMemo, Wanted
from autosplit.profile.types import Profile, StateProfile
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
    """A device's step, and the moment of it at which it holds the most.

    Attributes:
        epilogue_bytes: what the nodes that run once per step, on the whole batch, add on the last stage's device.
        guessed_bytes: the most scratch of one kernel that nobody measured.
    """

    step: DeviceReplay
    epilogue_bytes: int
    guessed_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All that it holds then."""
        return self.step.peak_bytes + self.epilogue_bytes

    @property
    def running(self) -> int:
        """The stage whose action runs then; in the optimizer's step the device's first."""
        action = self.step.peak.action
        return min(self.step.held) if action is None else action.stage

    def of(self, stage: int, *kinds: MemoryKind) -> int:
        """Return the bytes of some kinds that a stage holds then."""
        return sum(self.step.held[stage].get(kind, 0) for kind in kinds)


@dataclass(frozen=True)
class ReplayedStage:
    """What a stage's microbatches do, and what it holds beside them."""

    traces: StageTraces
    static: StaticBytes


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
    devices = replay(schedule, traces, [own.static for own in stages.values()], finish=finish)
    last, epilogue = schedule.stage_lane[-1], _epilogue_bytes(cut)
    return tuple(
        DevicePeak(
            device,
            epilogue if lane == last else 0,
            max((traces[stage].guessed_bytes for stage in device.held), default=0),
        )
        for lane, device in enumerate(devices)
    )


def replayed_stages(cut: Cut, *, memo: TraceMemo, stages: Iterable[int]) -> dict[int, ReplayedStage]:
    """Return what is replayed of some stages."""
    graphs = memo.graphs(cut.traced)
    nodes = {stage: graphs.nodes([info.name for info in cut.nodes.get(stage, ())]) for stage in stages}
    wanted = {stage: _wanted(cut, stage, own, memo) for stage, own in nodes.items()}
    traces = zip(wanted, memo.traces(wanted.values()), strict=True)
    return {stage: ReplayedStage(own, _static(cut, stage, nodes[stage])) for stage, own in traces}


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


def finish_of(cut: Cut, lane: int) -> tuple[Change, ...]:
    """Return what the optimizer allocates in its step on a device, as torch does by default; where there is a step."""
    if not cut.schedule.has_backward:
        return ()
    own, options = cut.schedule.stages_on(lane), cut.options
    trained = (s for s, home in cut.homes if home in own and s.trainable and s.elements)
    updated = [options.updated_bytes(elements=s.elements, parameter_bytes=s.bytes) for s in trained]
    return optimizer_changes(updated, name=options.optimizer, foreach=options.devices[lane].type != "cpu")


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
