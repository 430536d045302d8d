"""The solver's answer written down as a plan, and what a plan was made for."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from autosplit.errors import PlanError, ProfileError
from autosplit.options import Options
from autosplit.partition.solve import Partition
from autosplit.planning.memory import Cut, fullest_moments
from autosplit.planning.parallel.update import update_s
from autosplit.planning.peaks import PeakRange, peak_ranges
from autosplit.planning.plan.diff import entries_that_differ
from autosplit.planning.plan.fields import LaneCurve, MeshDegrees
from autosplit.planning.plan.figures import model_flops, overhead_s, parameter_dtype, peak_flops_per_s
from autosplit.planning.plan.notes import note_on_gradients, notes_of
from autosplit.planning.plan.plan import FITS, Plan
from autosplit.planning.plan.record import (
    Boundary,
    Fingerprint,
    PlanRecord,
    StagePlan,
    Transfer,
)
from autosplit.planning.plan.stage_memory import StageMemory
from autosplit.planning.profiled.apply import assign, boundaries_of, sent_s
from autosplit.planning.profiled.formulate import state_bytes
from autosplit.planning.profiled.messages import sending_pairs, waiting_bytes
from autosplit.planning.profiled.problem import ProfiledProblem
from autosplit.planning.profiled.specs import issue_threads, kernel_issue_s
from autosplit.profile.autocasting import autocast_of
from autosplit.profile.types import NodeTimes, Profile, StateProfile
from autosplit.schedule.action import Schedule
from autosplit.schedule.memory.pieces import MemoryKind, Recompute
from autosplit.schedule.memory.replay import DeviceReplay
from autosplit.trace.graph import NodeClass, TracedGraph, TracedNode
from autosplit.trace.scope import is_quantised

MOST_ACTIONS = 40_000
"""Of a longer step no curves are kept: they would be the larger part of the plan."""


class Writer:
    """Writes the solver's answer down as a plan."""

    def __init__(self, case: ProfiledProblem, partition: Partition) -> None:
        self.case, self.partition, self.problem = case, partition, case.problem
        self.costs, self.options, self.sizes, self.recorded = case.costs, case.options, case.sizes, case.recorded
        self.model, trace = case.recorded.model, case.recorded.trace
        self.traced = trace.graph
        self.whole = {p: why for p, why in trace.whole.items() if not is_quantised(self.model.get_submodule(p))}
        self.proof, whole = trace.proof, case.problem.schedule_of(partition.stages)
        self.lane = whole.stage_lane
        pairs = zip(case.names, partition.assignment, strict=True)
        solved = {name: stage for names, stage in pairs for name in names}
        self.stage_of = assign(case.index, solved, stages=partition.stages)
        self.gradients = case.recorded.outline.gradients(self.costs, self.stage_of, partition.stages)
        self.schedule = whole.needed(self.gradients)
        self.recompute = tuple(cast(Recompute, option) for option in partition.costs.recompute)
        blocks = case.recorded.outline.served | case.recorded.outline.blocks
        self._cut = Cut(
            self.traced, self.costs, self.options, self.stage_of, self.sizes, self.schedule, self.recompute, blocks
        )

    @property
    def fullest(self) -> tuple[DeviceReplay, ...]:
        """Each device at its fullest moment; nothing where it cannot be replayed."""
        return self._replayed[0]

    @cached_property
    def _replayed(self) -> tuple[tuple[DeviceReplay, ...], str | None]:
        try:
            with autocast_of(self.options.precision, kernels=self.options.kernels):
                return fullest_moments(self._cut, memo=self.recorded.memo), None
        except ProfileError as error:  # a stage that cannot be replayed: the formula's peaks stay
            return (), str(error).partition("\n")[0]

    @cached_property
    def ranges(self) -> Mapping[int, PeakRange]:
        """The range of each device's peak, by lane, where it has one."""
        with autocast_of(self.options.precision, kernels=self.options.kernels):
            ranges = peak_ranges(self._cut, self.fullest, memo=self.recorded.memo)
        return {lane: found.above(self._waiting[lane]) for lane, found in ranges.items()}

    @cached_property
    def peaks(self) -> list[int]:
        """The peak of every device: replayed, or where that was not possible by the solver's formula.

        Processes have messages on their way beside that.
        """
        replayed = [device.peak_bytes for device in self.fullest]
        peaks = replayed or list(self.partition.costs.device_bytes)
        return [peak + self._waiting[lane] for lane, peak in enumerate(peaks)]

    @cached_property
    def _boundaries(self) -> tuple[Boundary, ...]:
        return tuple(boundaries_of(self.case.index, self.costs, self.stage_of))

    @cached_property
    def _waiting(self) -> Counter[int]:
        """The bytes of messages that wait on each lane, between processes."""
        sent = self._boundaries if self.options.processes else ()
        return waiting_bytes(sent, self.schedule, self._cut.flows)

    @cached_property
    def _kept_bytes(self) -> tuple[int, ...]:
        """What NCCL keeps of each device."""
        return self.options.communicator_bytes(sending_pairs(self._boundaries, self.schedule))

    @cached_property
    def update_s(self) -> float:
        """How much later than the last action ranks or replicas have summed their gradients; a mesh's update too."""
        costs = self.partition.costs
        return update_s(costs.timeline, costs.transfers, self._cut.states, self.options)

    @property
    def step_s(self) -> float:
        """The step, without what a runtime takes beside it: the actions, what runs or is sent once, and the update."""
        once_s = shared_s(self.traced, self.costs) + sent_s(self._boundaries, self.costs, self.options)
        return self.partition.costs.step_s + once_s + self.update_s

    def plan(self) -> Plan:
        """Return the plan with its prediction."""
        stages = tuple(self._stage(index) for index in range(self.partition.stages))
        boundaries = self._boundaries
        costs = self.partition.costs
        extra_s = overhead_s(self.options, stages, self.schedule, costs.timeline)
        peak = peak_flops_per_s(self.options, dtype := parameter_dtype(self.traced))
        plan = Plan(
            fingerprint=fingerprint_of(self.model, [info.name for _, info in self.traced.compute_nodes()]),
            devices=tuple(map(self.options.device_name, range(len(self.schedule.lanes)))),
            stages=stages,
            boundaries=boundaries,
            transfers=tuple(Transfer(**asdict(time)) for time in costs.transfers),
            chunks=self.options.chunks,
            microbatch_rows=self.sizes,
            schedule=self.schedule.name,
            virtual_stages=self.problem.virtual_stages,
            schedule_rows=self.options.actions,
            optimizer=str(self.options.optimizer),
            offload=self.options.offload,
            machine=None if self.options.machine is None else self.options.machine.name,
            mesh=None if self.options.placed is None else MeshDegrees(**asdict(self.options.parallel)),
            precision=self.options.precision,
            issue_threads=issue_threads(self.options),
            processes=self.options.processes,
            step_s=self.step_s + extra_s,
            overhead_s=extra_s,
            update_s=self.update_s,
            bubble=costs.timeline.bubble,
            bottleneck_s=self.partition.costs.bottleneck_s,
            lower_bound_s=self.partition.lower_bound_s + shared_s(self.traced, self.costs),
            status=self.partition.status,
            objective="step_time",
            **fit_of(stages),
            class_flops=self._class_flops(),
            measured=self.costs.measured,
            dtype=dtype,
            sequence=self.recorded.tokens,
            model_flops=model_flops(self.traced, self.case.whole, self.sizes, backward=self.schedule.has_backward)
            * self.options.parallel.replicas,
            peak_flops_per_s=None if peak is None else peak * self.options.parallel.ranks / self.options.parallel.pp,
            curves=lane_curves(self.fullest, self.schedule, waiting=self._waiting),
            notes=(
                *notes_of(self.case, self.partition, self.peaks, unreplayed=self._replayed[1]),
                *note_on_gradients(self.schedule),
            ),
            whole=tuple(f"{path}: {reason}" for path, reason in self.whole.items()),
            proofs=() if self.proof is None else (self.proof,),
        )
        return plan.sealed()

    def _stage(self, index: int) -> StagePlan:
        names = [info.name for info in self._nodes[index]]
        seconds = self.partition.costs.timeline.seconds
        parameters = [s for s in self._states(index) if s.is_parameter]
        again = self.problem.again(self.recompute[index]) * (self.gradients[index] != "none")
        issue = self._issue(index)
        return StagePlan(
            index=index,
            device=self.options.device_name(self.lane[index]),
            lane=self.lane[index],
            nodes=tuple(names),
            modules=tuple(covered_modules(self.model, names)),
            parameters=sum(self.case.whole.state[s.name].elements for s in parameters),
            trained=sum(self.case.whole.state[s.name].elements for s in parameters if s.trainable),
            forward_s=seconds["F"][index],
            backward_s=seconds["B"][index],
            recompute=self.recompute[index],
            again_s=again * seconds["F"][index],
            gradients=self.gradients[index],
            weight_s=seconds["W"][index],
            forward_issue_s=issue.forward_s,
            backward_issue_s=issue.backward_s + again * issue.forward_s,
            replicas=len(self.schedule.lanes_of(index)),
            memory=self._memory(index),
        )

    def _issue(self, index: int) -> NodeTimes:
        """Return how long a host thread issues a stage's kernels, per microbatch."""
        each_s = kernel_issue_s(self.options, self.lane[index])
        share = {NodeClass.MICRO: 1.0, NodeClass.FULL: 1 / len(self.sizes), NodeClass.SHARED: 0.0}
        nodes = self._nodes[index] if each_s else ()
        weighted = [(self.costs.nodes[info.name], each_s * share[info.node_class]) for info in nodes]
        return NodeTimes(
            sum(len(node.forward_operations) * issue_s for node, issue_s in weighted),
            self.schedule.has_backward * sum(len(node.backward_operations) * issue_s for node, issue_s in weighted),
        )

    def _memory(self, index: int) -> StageMemory:
        """Return what a stage holds at its device's peak; transient bytes count for the stage that runs then."""
        lane = self._fullest_lane(index)
        peak = self.peaks[lane]
        stages = self.schedule.stages_on(lane)
        running = self.fullest[lane].running if self.fullest else stages[0]
        held = sum(sum(self._held(stage).values()) for stage in stages)
        return StageMemory(
            **self._held(index),
            transient_bytes=peak - held if index == running else 0,
            peak_bytes=peak,
            capacity_bytes=self.options.capacity_bytes(lane, kept_bytes=self._kept_bytes[lane]),
            reserve_bytes=self.options.reserved_bytes(lane),
            communicator_bytes=self._kept_bytes[lane],
            **(asdict(self.ranges[lane]) if lane in self.ranges else {}),
        )

    def _fullest_lane(self, index: int) -> int:
        """Return the lane of a stage, of its replicas the first that holds the most."""
        return max(self.schedule.lanes_of(index), key=lambda lane: self.peaks[lane])

    def _held(self, index: int) -> dict[str, Any]:
        held = bytes_of_states(self._states(index), self.options)
        if not self.fullest:
            return held | {"activation_bytes": self.partition.costs.stages[index].activation_bytes}
        full = self.fullest[self._fullest_lane(index)]
        activations = full.of(index, "activations", "whole_batch", "casts")
        return held | {"gradient_bytes": full.of(index, "gradients"), "activation_bytes": activations}

    def _states(self, index: int) -> Sequence[StateProfile]:
        """Return the parameters and buffers whose home a stage is."""
        return self._cut.states.get(index, ())

    @cached_property
    def _nodes(self) -> Sequence[list[TracedNode]]:
        """Each stage's nodes, in model order."""
        nodes: list[list[TracedNode]] = [[] for _ in range(self.partition.stages)]
        for _, info in self.traced.compute_nodes():
            nodes[self.stage_of[info.name]].append(info)
        return nodes

    def _class_flops(self) -> dict[str, float]:
        """Return each class's share of the step's forward FLOPs: micro nodes run once per microbatch."""
        totals = dict.fromkeys((c.value for c in NodeClass), 0.0)
        for _, info in self.traced.compute_nodes():
            times = len(self.sizes) if info.node_class is NodeClass.MICRO else 1
            totals[info.node_class.value] += times * self.costs.nodes[info.name].forward_flops
        whole = sum(totals.values())
        return {name: total / whole if whole else 0.0 for name, total in totals.items()}


def shared_s(traced: TracedGraph, costs: Profile) -> float:
    """Return the time of the shared nodes: they run once per step, wherever the cut is."""
    shared = (info.name for _, info in traced.compute_nodes() if info.node_class is NodeClass.SHARED)
    return sum(costs.nodes[name].forward_s + costs.nodes[name].backward_s for name in shared)


def bytes_of_states(states: Sequence[StateProfile], options: Options) -> dict[str, Any]:
    """Return what parameters and buffers take at home, with gradients and optimizer state, as `StageMemory` has it."""
    totals = [state_bytes(state, options) for state in states]
    owns = zip(states, totals, strict=True)
    return {
        "parameter_bytes": sum(total.tensor for s, total in owns if s.is_parameter),
        "buffer_bytes": sum(s.bytes for s in states if not s.is_parameter),
        "gradient_bytes": sum(total.gradient for total in totals),
        "optimizer_bytes": sum(total.optimizer for total in totals),
    }


def fit_of(stages: Sequence[StagePlan]) -> dict[str, Any]:
    """Compare peaks with capacities: a plan's ``verdict``, and ``fits``, which is None where that is borderline.

    Borderline is also a plan for devices of which no capacity is known. A peak without a range is borderline up to 5%
    above its capacity; a limit that was given is met.
    """
    verdicts = {stage.memory.verdict for stage in stages}
    verdict = next((worst for worst in (None, "no", "borderline") if worst in verdicts), "fits") or "borderline"
    return {"fits": FITS[verdict], "verdict": verdict}


def covered_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the deepest common description of a stage: the modules whose own operations lie in it, in order."""
    paths = dict.fromkeys(name.split("#")[0] for name in names)
    return [path or type(model).__name__ for path in paths]


def lane_curves(
    fullest: Sequence[DeviceReplay], schedule: Schedule, *, waiting: Mapping[int, int]
) -> tuple[LaneCurve, ...]:
    """Return what each device holds at the fullest moment of each of its actions, and in the optimizer's step.

    ``waiting`` are the bytes of messages that wait on it. Empty where nothing was replayed, or the step has more than
    :data:`MOST_ACTIONS` actions.
    """
    if sum(map(len, schedule.lanes)) > MOST_ACTIONS:
        return ()
    return tuple(
        _curve(device, actions=len(actions), waiting=waiting.get(lane, 0))
        for lane, (device, actions) in enumerate(zip(fullest, schedule.lanes, strict=False))
    )


def _curve(device: DeviceReplay, *, actions: int, waiting: int) -> LaneCurve:
    moments = [moment.bytes for moment in device.moments]
    if len(moments) == actions:  # the optimizer's step allocates nothing: what is left stays
        moments.append(device.left)

    def of(*kinds: MemoryKind) -> tuple[int, ...]:
        return tuple(sum(moment.get(kind, 0) for kind in kinds) for moment in moments)

    return LaneCurve(
        parameter_bytes=of("parameters"),
        gradient_bytes=of("gradients"),
        optimizer_bytes=of("optimizer"),
        activation_bytes=of("activations", "whole_batch", "casts"),
        transient_bytes=tuple(count + waiting for count in of("transient")),
    )


_NAMED = 4
"""How many entries an error names."""


def state_entries(model: nn.Module) -> list[str]:
    """List names and shapes of all parameters and buffers; dtypes may change under a plan (``.double()``)."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return sorted(f"{name}{list(tensor.shape)}" for name, tensor in tensors)


def fingerprint_of(model: nn.Module, nodes: list[str]) -> Fingerprint:
    """Return the fingerprint of a model and of the nodes that were planned."""
    entries = tuple(state_entries(model))
    return Fingerprint(
        model=type(model).__name__,
        state=_hash(entries),
        nodes=_hash(nodes),
        torch=str(torch.__version__),
        entries=entries,
    )


def check_plan(plan: PlanRecord, model: nn.Module, *, devices: int) -> None:
    """Raise PlanError when a plan was made for another model or for more devices."""
    entries, planned = state_entries(model), plan.fingerprint
    if planned.state != _hash(entries):
        different = entries_that_differ(planned.entries, entries) if planned.entries else []
        more = f"; {len(different) - _NAMED} more differ" if len(different) > _NAMED else ""
        which = f": {'; '.join(different[:_NAMED])}{more}" if different else f" ({len(entries)} entries)"
        raise PlanError(
            f"the plan was made for {planned.model} with other parameters or buffers than this {type(model).__name__} "
            f"has{which}; plan again: autosplit(model, ...) without plan="
        )
    if len(plan.devices) > devices:
        raise PlanError(f"the plan has {len(plan.devices)} lanes, devices names {devices}; give one device per lane")


def _hash(entries: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]
