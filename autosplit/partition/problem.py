"""What is to be cut: works, the tensors between them, the storages they keep, and the limits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import build

RECOMPUTE = ("never", "except_last", "always", "block")
"""What a stage may recompute in its backward to save memory: nothing, all but the last microbatch, all, or blocks."""


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
    """A graph to be cut into stages; who makes one has checked its numbers.

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
        block_again: the part of their forwards that stages with recompute="block" do again.
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
    block_again: float = field(default=1.0, kw_only=True)

    def schedule_of(self, stages: int) -> Schedule:
        """Return the schedule of so many stages."""
        if self.custom_schedule is not None:
            return self.custom_schedule
        return build(self.schedule, stages=stages, microbatches=self.microbatches, virtual_stages=self.virtual_stages)

    def again(self, option: str) -> float:
        """Return which part of its forwards a stage does again in its backwards."""
        part = {"never": 0.0, "except_last": (self.microbatches - 1) / self.microbatches, "block": self.block_again}
        return part.get(option, 1.0)

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """Return how many microbatches each of so many stages holds at most."""
        return self.schedule_of(stages).in_flight

    def lanes(self, stages: int) -> tuple[int, ...]:
        """Return the position of each stage's device."""
        in_order = self.custom_schedule is None and self.virtual_stages == 1
        return tuple(range(stages)) if in_order else self.schedule_of(stages).stage_lane

    @property
    def capacity_bytes(self) -> tuple[int | None, ...] | None:
        """The limit in bytes of each device (None: no limit); None if no device has a limit."""
        if self.devices is None or all(device.capacity_bytes is None for device in self.devices):
            return None
        return tuple(device.capacity_bytes for device in self.devices)

    @property
    def precedence(self) -> frozenset[tuple[int, int]]:
        """Pairs of works of which the first must not lie in a later stage than the second."""
        flows = {(net.producer, consumer) for net in self.nets if net.ordered for consumer in net.consumers}
        return frozenset(flows | set(self.order))


def devices_of(capacities: Iterable[int | None]) -> tuple[Device, ...]:
    """Return devices of equal speed, with these many bytes each."""
    return tuple(Device(capacity_bytes=capacity) for capacity in capacities)
