"""What is to be cut: works, the tensors between them, the storages they keep, and the limits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

_SCHEDULES = ("gpipe", "1f1b", "forward")
"""Those that give a device one stage and run a backward as a whole: what the costs of a stage are made for."""


@dataclass(frozen=True)
class Work:
    """One node, or one group of nodes that must stay together; times are per microbatch.

    ``static_bytes`` adds up over a stage, of ``transient_bytes`` the largest counts. Works of equal ``colour`` share a
    stage.
    """

    name: str
    forward_s: float
    backward_s: float
    static_bytes: int = 0
    transient_bytes: int = 0
    colour: Hashable | None = None


@dataclass(frozen=True)
class Net:
    """One tensor: its producer and consumers (indices of works), and what a transfer costs each stage it touches.

    A stage pays once when it holds the producer and not all consumers, or a consumer and not the producer.
    """

    producer: int
    consumers: tuple[int, ...]
    forward_s: float
    backward_s: float


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
class Problem:
    """A graph to be cut into stages.

    Attributes:
        works: in model order.
        nets: each net's consumers must lie in the producer's stage or a later one.
        holds: the storages that live from forward to backward.
        order: pairs of works of which the first must not lie in a later stage than the second.
        microbatches, schedule: set how many microbatches each stage holds in flight.
        capacity_bytes: one per stage, or None for no limit.
    """

    works: tuple[Work, ...]
    nets: tuple[Net, ...]
    holds: tuple[Hold, ...] = ()
    order: tuple[tuple[int, int], ...] = ()
    microbatches: int = field(kw_only=True)
    schedule: str = field(default="1f1b", kw_only=True)
    capacity_bytes: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.works:
            raise ValueError("a problem needs at least one work")
        if self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches}; it is at least 1")
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"no cut is known for schedule {self.schedule!r}; choose one of {', '.join(_SCHEDULES)}")
        for work in self.works:
            if min(work.forward_s, work.backward_s, work.static_bytes, work.transient_bytes) < 0:
                raise ValueError(f"{work} has a negative cost")
        for net in self.nets:
            if min(net.forward_s, net.backward_s) < 0:
                raise ValueError(f"{net} has a negative cost")
            self._check_indices(net, (net.producer, *net.consumers))
        for hold in self.holds:
            if hold.bytes < 0:
                raise ValueError(f"{hold} has negative bytes")
            own = () if hold.producer is None else (hold.producer,)
            self._check_indices(hold, (*own, *hold.consumers, *hold.savers))
        for pair in self.order:
            self._check_indices(pair, pair)

    def _check_indices(self, owner: object, indices: tuple[int, ...]) -> None:
        if not all(0 <= index < len(self.works) for index in indices):
            raise ValueError(f"{owner} refers to a work outside 0..{len(self.works) - 1}")

    @property
    def precedence(self) -> frozenset[tuple[int, int]]:
        """Pairs of works of which the first must not lie in a later stage than the second."""
        flows = {(net.producer, consumer) for net in self.nets for consumer in net.consumers}
        return frozenset(flows | set(self.order))
