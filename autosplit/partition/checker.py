"""What an assignment costs, counted straight from the problem: the solver's checker shares no code with the search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autosplit.partition.problem import Problem
from autosplit.schedule.action import Schedule, gradients_of
from autosplit.schedule.simulate import Timeline, TransferTime, simulate


@dataclass(frozen=True)
class StageBytes:
    """The parts of a stage's peak: what stays, what microbatches in flight hold, the worst node's transient."""

    static_bytes: int
    resident_bytes: int
    """Held from a microbatch's forward to its backward, per microbatch."""
    in_flight: int
    transient_bytes: int

    @property
    def activation_bytes(self) -> int:
        """Bytes of all microbatches in flight."""
        return self.in_flight * self.resident_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that live at one moment of the step."""
        return self.static_bytes + self.activation_bytes + self.transient_bytes


@dataclass(frozen=True)
class Costs:
    """Loads and bytes of each stage of an assignment, the device of each stage, and what each stage does again."""

    loads_s: tuple[float, ...]
    stages: tuple[StageBytes, ...]
    recompute: tuple[str, ...]
    lane: tuple[int, ...]
    cut: _CheckedCut = field(repr=False, compare=False)

    @property
    def device_loads_s(self) -> tuple[float, ...]:
        """The load of each device: the sum of its stages; replicas share the load of a stage."""
        loads_s = [load_s / len(self._schedule.lanes_of(stage)) for stage, load_s in enumerate(self.loads_s)]
        return tuple(sum(loads_s[stage] for stage in stages) for stages in self._stages_on)

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each device: of its stages' transients the largest counts."""
        return tuple(_peak_bytes([self.stages[stage] for stage in stages]) for stages in self._stages_on)

    @property
    def _schedule(self) -> Schedule:
        return self.cut.problem.schedule_of(self.cut.count)

    @property
    def _stages_on(self) -> list[list[int]]:
        """The stages of each device, without empty ones at the end."""
        devices = range(max(self._schedule.lanes_of(stage).stop for stage in range(len(self.lane))))
        return [[stage for stage in self._schedule.stages_on(at) if stage < len(self.lane)] for at in devices]

    @property
    def bottleneck_s(self) -> float:
        """The largest load of a device."""
        return max(self.device_loads_s)

    @property
    def stage_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each stage, alone on its device."""
        return tuple(stage.peak_bytes for stage in self.stages)

    @cached_property
    def timeline(self) -> Timeline:
        """One step, simulated."""
        return self.cut.timeline(self.recompute)

    @cached_property
    def step_s(self) -> float:
        """How long one step takes, with what its stages do once per step at most."""
        return self.timeline.step_s + self.cut.once_s()

    @property
    def transfers(self) -> tuple[TransferTime, ...]:
        """What travels between two stages per microbatch, on the slowest link between their devices."""
        return self.cut.transfers()


def check(
    problem: Problem,
    assignment: Sequence[int],
    *,
    recompute: Sequence[str] | None = None,
    stages: int | None = None,
) -> Costs:
    """Return the costs of ``assignment[work] = stage``; raise ValueError when it is not legal.

    ``recompute`` has an option per stage; by default nothing is done again. Stages may be empty; capacities play no
    part. ``stages`` says how many the schedule is made for, by default as many as up to the last with a work; empty
    ones at the end, each alone on its device, are left out of the costs.
    """
    _check_legal(problem, assignment)
    # As many stages as fill the devices.
    count = -(-(max(assignment) + 1) // problem.virtual_stages) * problem.virtual_stages
    if problem.custom_schedule is not None:
        count = problem.custom_schedule.stages
    cut = _CheckedCut(problem, tuple(assignment), max(count, stages or 0))
    chosen = ("never",) * count if recompute is None else tuple(recompute)
    return Costs(
        loads_s=tuple(cut.load_s(stage, chosen[stage]) for stage in range(count)),
        stages=tuple(cut.stage_bytes(stage, option) for stage, option in enumerate(chosen)),
        recompute=chosen,
        lane=cut.lane[:count],
        cut=cut,
    )


def _check_legal(problem: Problem, assignment: Sequence[int]) -> None:
    if len(assignment) != len(problem.works):
        raise ValueError(f"{len(assignment)} stages are assigned to {len(problem.works)} works")
    for before, after in problem.precedence:
        if assignment[before] > assignment[after]:
            raise ValueError(
                f"{problem.works[before].name!r} in stage {assignment[before]} must not come after "
                f"{problem.works[after].name!r} in stage {assignment[after]}"
            )
    stage_of: dict[object, int] = {}
    for work, stage in zip(problem.works, assignment, strict=True):
        if work.colocation_group is not None and stage_of.setdefault(work.colocation_group, stage) != stage:
            raise ValueError(
                f"colocation group {work.colocation_group!r} is in stages {stage_of[work.colocation_group]} and {stage}"
            )


def _peak_bytes(stages: Sequence[StageBytes]) -> int:
    """Return what stages need that share a device: the worst transient counts once."""
    held = sum(stage.static_bytes + stage.activation_bytes for stage in stages)
    return held + max((stage.transient_bytes for stage in stages), default=0)


class _CheckedCut:
    """A legal assignment, taken apart by stage."""

    def __init__(self, problem: Problem, assignment: tuple[int, ...], count: int) -> None:
        self.problem, self.assignment, self.count = problem, assignment, count
        self.in_flight = problem.in_flight(count)
        self.lane = problem.lanes(count)
        self.members: list[list[int]] = [[] for _ in range(count)]
        for work, stage in enumerate(assignment):
            self.members[stage].append(work)
        back = [stage for stage, work in zip(assignment, problem.works, strict=True) if work.backward_s]
        first = min(back, default=count) if min(assignment) < min(back, default=count) else 0  # not of empty stages
        self.gradients = gradients_of(count, flows=[first], trained=range(count))
        self.net_s = [0.0] * count
        for net in problem.nets:
            for stage in self._apart((net.producer, *net.consumers)):
                self.net_s[stage] += net.forward_s + net.backward_s
        self.tie_s = [0.0] * count
        self.tied_bytes = [0] * count
        for tie in problem.ties:
            touched = {assignment[user] for user in tie.users}
            for stage in touched:
                self.tied_bytes[stage] += tie.home_bytes if stage == min(touched) else tie.copy_bytes
            for stage in self._apart(tie.users):
                self.tie_s[stage] += tie.transfer_s
        self._weigh_holds()

    def _apart(self, pins: Iterable[int]) -> set[int]:
        """Return the stages of the pins, none when they are all in one."""
        touched = {self.assignment[pin] for pin in pins}
        return touched if len(touched) > 1 else set()

    def _weigh_holds(self) -> None:
        """Sum, by stage, what is kept, what of it crosses boundaries, and what is left when blocks are done again."""
        self.kept, self.boundary, self.of_blocks = ([0] * self.count for _ in range(3))
        self.saved: dict[object, int] = {}
        stage_of = self.assignment
        for hold in self.problem.holds:
            source = hold.producer
            crossed = {stage_of[pin] for pin in hold.consumers}
            if source is not None:
                crossed = self._apart((source, *hold.consumers))
            kept = crossed | {stage_of[saver] for saver in hold.savers}
            home = None if source is None else self._block(source)
            entering = {pin for pin in (*hold.consumers, *hold.savers) if self._block(pin) != home}
            # What other blocks take is kept for these to be done again.
            taken = {pin for pin in entering.intersection(hold.consumers) if self.problem.works[pin].block is not None}
            kept_by_blocks = kept | {stage_of[pin] for pin in taken}
            entered = {stage_of[pin] for pin in entering}
            for sums, stages in (
                (self.kept, kept),
                (self.boundary, crossed),
                (self.of_blocks, crossed | kept_by_blocks & entered),
            ):
                for stage in stages:
                    sums[stage] += hold.bytes
            if home is not None and any(self._block(saver) == home for saver in hold.savers):
                self.saved[home] = self.saved.get(home, 0) + hold.bytes

    def _block(self, work: int) -> tuple[bool, object]:
        named = self.problem.works[work].block
        return (False, work) if named is None else (True, named)

    def _slowdown(self, stage: int) -> float:
        devices = self.problem.devices
        return 1.0 if devices is None else devices[self.lane[stage]].slowdown

    def _recomputed_s(self, stage: int, option: str) -> float:
        forward_s = sum(self.problem.works[work].forward_s for work in self.members[stage])
        return self.problem.again(option) * forward_s * (self.gradients[stage] != "none")

    def load_s(self, stage: int, option: str) -> float:
        """Return the seconds per microbatch, a share of what is done once per step included."""
        works = [self.problem.works[work] for work in self.members[stage]]
        works_s = sum(work.forward_s + work.backward_s for work in works) + self._recomputed_s(stage, option)
        each_s = self._slowdown(stage) * works_s + self._link(stage) * self.net_s[stage]
        return each_s + self._link(stage) * self.tie_s[stage] / self.problem.microbatches

    def _link(self, stage: int) -> float:
        """Return the slower of the links next to the stage's position."""
        lane = self.lane[stage]
        return max((self.problem.links or ())[max(lane - 1, 0) : lane + 1], default=1.0)

    def stage_bytes(self, stage: int, option: str) -> StageBytes:
        """Return the stage's bytes under a recompute option."""
        works = self.members[stage]
        transient = max((self.problem.works[work].transient_bytes for work in works), default=0)
        resident = self.kept[stage]
        if option in ("always", "except_last"):
            resident = self.boundary[stage]
            transient += self.kept[stage] - resident
        elif option == "block":
            resident = self.of_blocks[stage]
            again = (self.saved.get(self._block(work), 0) + self.problem.works[work].transient_bytes for work in works)
            transient = max(again, default=0)
        return StageBytes(
            static_bytes=sum(self.problem.works[work].static_bytes for work in works) + self.tied_bytes[stage],
            resident_bytes=resident,
            in_flight=self.in_flight[stage],
            transient_bytes=transient,
        )

    def once_s(self) -> float:
        """Return the most that a stage does once per step."""
        return max(self._link(stage) * seconds for stage, seconds in enumerate(self.tie_s))

    def timeline(self, recompute: Sequence[str]) -> Timeline:
        """Simulate one step."""
        schedule = self.problem.schedule_of(self.count).needed(self.gradients)
        forward, backward, weight = ([0.0] * self.count for _ in range(3))
        for stage, members in enumerate(self.members):
            if not members:
                continue
            works = [self.problem.works[work] for work in members]
            each = self._slowdown(stage)
            forward[stage] = each * sum(work.forward_s for work in works)
            weight[stage] = each * sum(work.weight_s for work in works)
            again_s = self._recomputed_s(stage, recompute[stage])
            backward[stage] = each * (sum(work.backward_s for work in works) + again_s)
        return simulate(
            schedule,
            forward_s=forward,
            backward_s=backward,
            input_gradient_s=[whole - weight_s for whole, weight_s in zip(backward, weight, strict=True)],
            weight_gradient_s=weight,
            transfers=self.transfers(),
        )

    def transfers(self) -> tuple[TransferTime, ...]:
        """Return what travels between stages: each net once per stage that consumes it, all between two in sequence."""
        seconds: dict[tuple[int, int], list[float]] = {}
        for net in self.problem.nets:
            source = self.assignment[net.producer]
            for stage in {self.assignment[consumer] for consumer in net.consumers} - {source}:
                pair = seconds.setdefault((min(source, stage), max(source, stage)), [0.0, 0.0])
                # What is not ordered is a gradient.
                pair[0] += net.forward_s if net.ordered else 0.0
                pair[1] += net.backward_s if net.ordered else net.forward_s + net.backward_s
        transfers = []
        for (producer, consumer), (forward_s, backward_s) in sorted(seconds.items()):
            ends = sorted((self.lane[producer], self.lane[consumer]))
            link = max((self.problem.links or ())[ends[0] : ends[1]], default=1.0)
            transfers.append(TransferTime(producer, consumer, link * forward_s, link * backward_s))
        return tuple(transfers)
