"""Bytes of one stage over a step by an additive formula: cheap enough to be asked inside the partition search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


def stage_bytes(*, static_bytes: int, resident_bytes: int, in_flight: int, transients: Iterable[int]) -> StageBytes:
    """Return a stage's bytes: ``peak = static + in_flight * resident + max(transient)``.

    The formula matched an op-by-op replay of GPipe and 1F1B when the backward transient of a node counts its
    cotangents and one gradient that has not been accumulated yet.
    """
    return StageBytes(
        static_bytes=static_bytes,
        resident_bytes=resident_bytes,
        in_flight=in_flight,
        transient_bytes=max(transients, default=0),
    )
