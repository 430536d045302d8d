"""What is to be cut: works, the tensors between them, the storages they keep, and the limits."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import SCHEDULES, build

RECOMPUTE = ("never", "except_last", "always", "block")
"""What a stage may do again in its backward so as not to keep it: nothing, all but the last microbatch, all, blocks."""


@dataclass(frozen=True)
class Work:
    """One node, or one group of nodes that must stay together; times are per microbatch.

    ``static_bytes`` adds up over a stage, of ``transient_bytes`` the largest counts. Works of equal
    ``colocation_group`` share a stage. ``weight_s`` is the part of ``backward_s`` that only weight gradients need (W of
    a split backward), and ``split_s`` how much longer than ``backward_s`` the two parts take together. Works of equal
    ``block`` are recomputed together under ``recompute="block"``; None is a block of its own. ``step_bytes`` add up
    beside ``static_bytes`` in the optimizer's step, when nothing else is held; only the search in units counts them.
    """

    name: str
    forward_s: float
    backward_s: float
    static_bytes: int = 0
    transient_bytes: int = 0
    colocation_group: Hashable | None = None
    weight_s: float = 0.0
    split_s: float = 0.0
    block: Hashable | None = None
    step_bytes: int = 0


@dataclass(frozen=True)
class TensorEdge:
    """One tensor: its producer and consumers (indices of works), and what a transfer costs each stage it touches.

    A stage pays once when it holds the producer and not all consumers, or a consumer and not the producer. Where the
    net is ``ordered`` no consumer lies in an earlier stage than the producer.
    """

    producer: int
    consumers: tuple[int, ...]
    forward_s: float
    backward_s: float
    ordered: bool = True


@dataclass(frozen=True)
class Hold:
    """One storage that a stage keeps per microbatch in flight.

    It is kept where a saver is (a work whose backward reads it), and where a boundary touches it: producer inside and a
    consumer outside, or a consumer inside and the producer outside. ``producer=None`` is an input of the model.
    """

    bytes: int
    producer: int | None
    consumers: tuple[int, ...]
    savers: tuple[int, ...]


@dataclass(frozen=True)
class Tie:
    """One tied parameter: its home is the first stage that holds a user, every other such stage makes a copy per step.

    The home has ``home_bytes`` and each other stage ``copy_bytes`` of static bytes; neither is counted in its works.
    ``transfer_s`` is what bringing the copy and its gradient takes, once per step, of each stage that takes part.
    """

    users: tuple[int, ...]
    home_bytes: int
    copy_bytes: int
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Device:
    """Where stages run: works take ``slowdown`` times as long there."""

    slowdown: float = 1.0
    capacity_bytes: int | None = None


@dataclass(frozen=True)
class Problem:
    """A graph to be cut into stages.

    Attributes:
        works: in model order.
        nets: the tensors between them.
        holds: the storages that live from forward to backward.
        order: pairs of works of which the first must not lie in a later stage than the second.
        ties: parameters that several works use.
        microbatches, schedule, virtual_stages: set how many microbatches each stage holds in flight, and which stages
            share a device (more than one under interleaved, looped_bfs and zb_v).
        custom_schedule: a schedule that no name stands for, with its own stages and their devices;
            ``microbatches`` are as many as it has, and ``virtual_stages`` the most stages that it puts on one device.
        devices: in pipeline order; None stands for equal ones without a limit, as many as stages are asked for.
        links: how many times slower than what nets say the link between neighbouring devices is, one fewer than
            devices; a transfer further than that is as slow as the slowest link between. None: all alike.
    """

    works: tuple[Work, ...]
    nets: tuple[TensorEdge, ...]
    holds: tuple[Hold, ...] = ()
    order: tuple[tuple[int, int], ...] = ()
    ties: tuple[Tie, ...] = ()
    microbatches: int = field(kw_only=True)
    schedule: str = field(default="1f1b", kw_only=True)
    virtual_stages: int = field(default=1, kw_only=True)
    custom_schedule: Schedule | None = field(default=None, kw_only=True)
    devices: tuple[Device, ...] | None = field(default=None, kw_only=True)
    links: tuple[float, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.works:
            raise ValueError("a problem needs at least one work")
        if self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches}; it is at least 1")
        if self.custom_schedule is None and self.schedule not in SCHEDULES:
            raise ValueError(f"there is no schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        if self.custom_schedule is None:
            self._check_virtual_stages()
        self._check_devices()
        self._check_links()
        self._check_costs()

    def _check_virtual_stages(self) -> None:
        allowed, asked = SCHEDULES[self.schedule].virtual_stages, self.virtual_stages
        if asked < 2 if allowed is None else asked != allowed:
            takes = "2 or more stages" if allowed is None else f"{allowed} stage{'s' if allowed > 1 else ''}"
            raise ValueError(f"virtual_stages is {asked}; {self.schedule} puts {takes} on a device")

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if not self.devices:
            raise ValueError("devices is empty; give at least one, or None for equal ones without a limit")
        for device in self.devices:
            if not (device.slowdown > 0 and math.isfinite(device.slowdown)):
                raise ValueError(f"{device}: slowdown must be positive and finite")
            if device.capacity_bytes is not None and not 0 <= device.capacity_bytes < math.inf:
                raise ValueError(f"{device}: capacity_bytes is not negative, and None where there is no limit")

    def _check_links(self) -> None:
        if self.links is None:
            return
        if self.devices is None or len(self.links) != len(self.devices) - 1:
            raise ValueError(f"{len(self.links)} links are given for {len(self.devices or ())} devices")
        if not all(link >= 0 and math.isfinite(link) for link in self.links):
            raise ValueError(f"links are {self.links}; none may be negative, infinite or NaN")

    def _check_costs(self) -> None:
        for work in self.works:
            numbers = (work.forward_s, work.backward_s, work.weight_s)
            _check_numbers(work, (*numbers, work.static_bytes, work.transient_bytes))
            if work.weight_s > work.backward_s:
                raise ValueError(f"{work}: weight_s is a part of backward_s")
        for net in self.nets:
            _check_numbers(net, (net.forward_s, net.backward_s))
            self._check_indices(net, (net.producer, *net.consumers))
        for hold in self.holds:
            _check_numbers(hold, (hold.bytes,))
            own = () if hold.producer is None else (hold.producer,)
            self._check_indices(hold, (*own, *hold.consumers, *hold.savers))
        for tie in self.ties:
            _check_numbers(tie, (tie.home_bytes, tie.copy_bytes, tie.transfer_s))
            self._check_indices(tie, tie.users)
            if not tie.users:
                raise ValueError(f"{tie} has no user")
        for pair in self.order:
            self._check_indices(pair, pair)

    def _check_indices(self, owner: object, indices: tuple[int, ...]) -> None:
        if indices and not (min(indices) >= 0 and max(indices) < len(self.works)):
            raise ValueError(f"{owner} refers to a work outside 0..{len(self.works) - 1}")

    def schedule_of(self, stages: int) -> Schedule:
        """Return the schedule of so many stages."""
        if self.custom_schedule is not None:
            return self.custom_schedule
        return build(self.schedule, stages=stages, microbatches=self.microbatches, virtual_stages=self.virtual_stages)

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """Return how many microbatches each of so many stages holds at most."""
        return self.schedule_of(stages).in_flight

    def lanes(self, stages: int) -> tuple[int, ...]:
        """Return the position of each stage's device."""
        in_order = self.custom_schedule is None and self.virtual_stages == 1
        return tuple(range(stages)) if in_order else self.schedule_of(stages).stage_lane

    @property
    def capacity_bytes(self) -> tuple[int | None, ...] | None:
        """Bytes of each device, None where there is no limit; None altogether where no device has one."""
        if self.devices is None or all(device.capacity_bytes is None for device in self.devices):
            return None
        return tuple(device.capacity_bytes for device in self.devices)

    @property
    def precedence(self) -> frozenset[tuple[int, int]]:
        """Pairs of works of which the first must not lie in a later stage than the second."""
        flows = {(net.producer, consumer) for net in self.nets if net.ordered for consumer in net.consumers}
        return frozenset(flows | set(self.order))


def recompute_fraction(option: str, *, microbatches: int) -> float:
    """Return which part of its forwards a stage does again in its backwards."""
    return {"never": 0.0, "except_last": (microbatches - 1) / microbatches}.get(option, 1.0)


def devices_of(capacities: Iterable[int | None]) -> tuple[Device, ...]:
    """Return devices of equal speed, with these many bytes each."""
    return tuple(Device(capacity_bytes=capacity) for capacity in capacities)


def _check_numbers(owner: object, numbers: Iterable[float]) -> None:
    for number in numbers:
        if not 0 <= number < math.inf:
            raise ValueError(f"{owner} has a negative cost, or one that is infinite or NaN")
