"""How much every stage of a plan holds: its nodes traced on fake tensors, the schedule's actions replayed over that.

What no trace of tensors tells, and by how much that can be wrong, is in :mod:`autosplit.planning.peaks`.
"""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from autosplit.progress import phase
from autosplit.schedule.action import Schedule
from autosplit.schedule.memory.offload import offloaded
from autosplit.schedule.memory.pieces import Change, RankParts, Recompute, StageTraces
from autosplit.schedule.memory.replay import DeviceReplay, StaticBytes, replay
from autosplit.schedule.memory.updates import handed_over, optimizer_changes
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.recording.draw_rules import drawn_bytes, is_drawn_beforehand
from autosplit.trace.scope import is_plain_layer


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
    def nodes(self) -> Mapping[tuple[int, NodeClass], Sequence[TracedNode]]:
        """The nodes of each class of each stage, in model order."""
        nodes: dict[tuple[int, NodeClass], list[TracedNode]] = defaultdict(list)
        for _, info in self.traced.compute_nodes():
            nodes[self.stage_of[info.name], info.node_class].append(info)
        return nodes

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
        nodes, goes_back = self.profile.nodes.items(), self.schedule.differentiated or range(self.schedule.stages)
        flows = {name: node.requires_grad and self.stage_of[name] in goes_back for name, node in nodes}
        return {**flows, **self.profile.input_grads}

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
    stages = {stage: replayed_stage(cut, stage, memo) for stage in range(schedule.stages)}
    traces = {stage: replayed.traces for stage, replayed in stages.items()}
    finish = {lane: finish_of(cut, lane, traces) for lane in range(len(schedule.lanes))}
    return replay(schedule, traces, [replayed.static for replayed in stages.values()], finish=finish)


def replayed_stage(cut: Cut, stage: int, memo: TraceMemo) -> ReplayedStage:
    """Return what is replayed of a stage: its microbatches, under "except_last" of both kinds."""
    nodes = memo.stages.of([info.name for info in cut.nodes[stage, NodeClass.MICRO]])
    first, option, ours = memo.stages.first_output, cut.recompute[stage], cut.options.parallel.runtime == "autosplit"
    never = How(
        cut.sizes[0],
        input_grads=cut.flows,
        roots=_roots(nodes, first),
        averaged=cut.averaged(first),
        loss=cut.options.loss,
        by_use=ours,
        apart=ours and _sums_apart(cut, stage, nodes),
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
    if "activations" in cut.options.offload and traces.never is not None:
        traces = replace(traces, never=offloaded(traces.never, cut.blocks))
    return ReplayedStage(traces, _static(cut, stage, nodes))


def _sums_apart(cut: Cut, stage: int, nodes: StageNodes) -> bool:
    """Tell whether a stage asks autograd for gradients: where backwards are split, or it reads parameters itself."""
    modules = [nodes.root.get_submodule(str(node.target)) for node in nodes.nodes if node.op == "call_module"]
    reads = any(p.requires_grad for module in modules if not is_plain_layer(module) for p in module.parameters())
    reads |= cut.recompute[stage] != "never" or cut.options.compile is not None
    return "I" in cut.schedule.kinds or (reads and cut.options.parallel.zero != 3)


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
    states = held | dict(shares.states)
    if parallel.scatters:
        states |= {name: states[name] * ranks for name, ranks in shares.experts.items()}
        wider /= parallel.replicas

    def whole(name: str) -> float:
        return cut.profile.bytes_of(name) / shares.of(name).held

    gathered = {name: count for name in shares.nodes if (count := shares.gathered(name, whole))}
    return RankParts(held, work, states, border, wider, gathered)


def _gathered(cut: Cut, stage: int) -> int:
    """Return what a stage holds of parameters and gradients that are whole for a while: of its largest block.

    Under ZeRO-3 there are the parameters of the block that runs and of the next, and gradients of two blocks: some are
    made while others are scattered, in the dtype of sums. Under ZeRO-2 there are one block's gradients.
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
    return sum(ordered[:count]) + sum(sums[:1]) + sum(ordered[1:count])


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
    once = [cut.profile.nodes[info.name].outputs for info in shared]
    once += [cut.profile.nodes[info.name].saved for info in cut.nodes[stage, NodeClass.SHARED]]
    epilogue = _epilogue(cut) if stage == cut.schedule.stages - 1 else ()
    parameters = sum(state_bytes(state, cut.options).tensor for state in states)
    return StaticBytes(
        parameters=(parameters + cut.copies.get(stage, 0) + _gathered(cut, stage),),
        optimizer=(sum(state_bytes(state, cut.options).optimizer for state in states),),
        whole_batch=(*ChainMap(*map(dict, once)).values(), *_drawn(cut, stage), *epilogue),
    )


def _drawn(cut: Cut, stage: int) -> tuple[int, ...]:
    """Return the bytes of what a stage's random nodes draw beforehand, for the whole batch."""
    if cut.options.rng != "plain":
        return ()
    taken = (info for info in cut.nodes[stage, NodeClass.MICRO] if info.random and is_drawn_beforehand(info))
    return tuple(drawn_bytes(info, rows=sum(cut.sizes)) for info in taken)


def finish_of(cut: Cut, lane: int, traces: Mapping[int, StageTraces]) -> tuple[Change, ...]:
    """Return what is allocated behind the last action of a device; empty for an evaluation.

    Gradients of a parameter's uses are added up. Replicas add up gradients a bucket at a time, those of shards one at a
    time where no backward has scattered them. Then the optimizer steps as torch does by default.
    """
    if not cut.schedule.has_backward:
        return ()
    stages, options = cut.schedule.stages_on(lane), cut.options
    trained = [s for s, home in cut.homes if home in stages and s.trainable and s.elements]
    summed = options.parallel.replicas > 1 or any(len(cut.schedule.lanes_of(stage)) > 1 for stage in stages)
    parallel, sizes = options.parallel, list(map(options.parallel.sum_of, trained))
    sizes = sizes if summed and not parallel.scatters else []
    bucket = max(sizes, default=0) if parallel.whole and not parallel.rules.beside else largest_bucket(sizes)
    changes = optimizer_changes(
        list(map(options.updated, trained)),
        name=options.optimizer,
        foreach=options.devices[lane].type != "cpu",
        masters_bytes=4 * BATCH_ELEMENTS if options.precision in MASTERS else None,
    )
    away = {stage for stage, at in enumerate(cut.schedule.stage_lane) if options.places[at] != options.places[lane]}
    copies = {state.name: sum(cut.stage_of[name] in away for name in state.uses) for state in trained}
    handed = handed_over([traces[stage] for stage in stages], copies)
    if bucket and not parallel.whole and "I" not in cut.schedule.kinds:  # it begins in the last backward, beside values
        saved = (traces[stage].pieces(last=True).piece("F", first=False).left for stage in stages)
        bucket += round(max(sum(left.values()) for left in saved) * (1 - bucket / sum(sizes)))
    return (*(((-1, bucket), (-1, -bucket)) if bucket else ()), *handed, *changes)


def _epilogue(cut: Cut) -> tuple[int, ...]:
    """Return the bytes of what the nodes that mix rows save and make, and of the worst of their transients."""
    infos = (info for _, info in cut.traced.compute_nodes() if info.node_class is NodeClass.FULL)
    nodes = [cut.profile.nodes[info.name] for info in infos]
    held: dict[int, int] = {}
    for node in nodes:
        held |= {**node.saved, **node.outputs}
    transients = (max(node.forward_transient_bytes, node.backward_transient_bytes) for node in nodes)
    return tuple(filter(None, (*held.values(), max(transients, default=0))))
