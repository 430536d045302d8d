"""Whether each device of a plan has room for what it holds, and what that is most of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autosplit.planning.plan.fields import MemoryItem, Verdict
from autosplit.planning.plan.plan import Plan

Term = Literal["states", "activations", "transient"]


@dataclass(frozen=True)
class DeviceVerdict:
    """One device at its fullest moment, and whether it has the room.

    Attributes:
        lane: its place among the plan's devices.
        stages: those that it runs.
        low_bytes, high_bytes: between which the peak comes out nine times in ten; both the peak where it has no range.
        items: what the range is made of.
        odds: the chance that the capacity holds the peak; None without a range or a capacity.
        reserve_bytes: what of the capacity is kept free.
        verdict: None where no capacity is known.
        states_bytes: parameters, buffers, gradients and optimizer state.
    """

    lane: int
    device: str
    stages: tuple[int, ...]
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    items: tuple[MemoryItem, ...]
    odds: float | None
    capacity_bytes: int | None
    reserve_bytes: int
    verdict: Verdict | None
    states_bytes: int
    activation_bytes: int
    transient_bytes: int

    @property
    def room_bytes(self) -> int | None:
        """The capacity less the reserve: what fits there surely fits."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.reserve_bytes

    @property
    def term(self) -> Term:
        """What takes the most of the peak; states where they alone are more than the device has."""
        if self.capacity_bytes is not None and self.states_bytes > self.capacity_bytes:
            return "states"
        return max(self._terms, key=lambda name: self._terms[name])

    @property
    def term_bytes(self) -> int:
        """The bytes of that."""
        return self._terms[self.term]

    @property
    def _terms(self) -> dict[Term, int]:
        return {"states": self.states_bytes, "activations": self.activation_bytes, "transient": self.transient_bytes}

    @property
    def share(self) -> float:
        """The peak over the capacity; 0 where that is not known."""
        return self.peak_bytes / max(self.capacity_bytes, 1) if self.capacity_bytes is not None else 0.0


def device_verdicts(plan: Plan) -> tuple[DeviceVerdict, ...]:
    """Return one verdict per device that runs a stage, in the order of the plan's devices."""
    verdicts = []
    for lane in sorted({stage.lane for stage in plan.stages}):
        stages = [stage for stage in plan.stages if stage.lane == lane]
        memory = [stage.memory for stage in stages]
        first = memory[0]
        verdicts.append(
            DeviceVerdict(
                lane=lane,
                device=stages[0].device,
                stages=tuple(stage.index for stage in stages),
                peak_bytes=first.peak_bytes,
                low_bytes=first.peak_bytes if first.low_bytes is None else first.low_bytes,
                high_bytes=first.peak_bytes if first.high_bytes is None else first.high_bytes,
                items=first.items,
                odds=first.odds,
                capacity_bytes=first.capacity_bytes,
                reserve_bytes=first.reserve_bytes,
                verdict=first.verdict,
                states_bytes=sum(
                    m.parameter_bytes + m.buffer_bytes + m.gradient_bytes + m.optimizer_bytes for m in memory
                ),
                activation_bytes=sum(m.activation_bytes for m in memory),
                transient_bytes=sum(m.transient_bytes for m in memory),
            )
        )
    return tuple(verdicts)


def binding(plan: Plan) -> DeviceVerdict | None:
    """Return the device that is nearest to its capacity, or furthest above it; None where no capacity is known."""
    known = [verdict for verdict in device_verdicts(plan) if verdict.capacity_bytes is not None]
    return max(known, key=lambda verdict: verdict.share) if known else None
