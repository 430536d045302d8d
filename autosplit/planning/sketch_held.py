"""What a run of units holds on its device, added up unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.planning.records import Unit


@dataclass
class _Block:
    """What is recomputed together: its number, what it keeps, and the most inside one of its units."""

    number: int | None
    kept: int = 0
    transient: float = 0.0


class Held:
    """What a run of units holds, unit by unit: its state, what it keeps of each microbatch, the most inside it."""

    def __init__(self, recompute: str, *, before: float, grown: float = 1.0, gradient: float = 0.0) -> None:
        """Start with no unit; ``before`` are the bytes that come in with a microbatch.

        Microbatches are ``grown`` times as large as those of the units; what lives inside a unit grows as they do but
        for its parameters' gradients, which are ``gradient`` of its state.
        """
        self.recompute, self.before, self.grown, self.gradient = recompute, before, grown, gradient
        self.static = self.everything = 0
        self.transient = self.largest = self.entering = 0.0
        self.arriving, self.block = before, _Block(None)

    def add(self, unit: Unit) -> None:
        """Put a unit behind the others."""
        if unit.block is None or unit.block != self.block.number:
            self.block = _Block(unit.block)
            self.entering += self.arriving
        whole = min(unit.transient_bytes, self.gradient * unit.static_bytes)
        transient = whole / self.grown + unit.transient_bytes - whole
        self.block.kept += unit.kept_bytes
        self.block.transient = max(self.block.transient, transient)
        self.static += unit.static_bytes
        self.everything += unit.kept_bytes
        self.transient = max(self.transient, transient)
        self.largest = max(self.largest, self.block.kept + self.block.transient)
        self.arriving = unit.sent_bytes

    @property
    def kept(self) -> float:
        """Bytes of each microbatch in flight."""
        if self.recompute == "never":
            return self.everything
        return min(self.everything, self.entering if self.recompute == "block" else self.before)

    @property
    def inside(self) -> float:
        """Bytes that live inside it while it works."""
        if self.recompute == "never":
            return self.transient
        return self.largest if self.recompute == "block" else self.everything + self.transient


def held_by(units: Sequence[Unit], recompute: str, *, before: float) -> Held:
    """Return what some units hold."""
    held = Held(recompute, before=before)
    for unit in units:
        held.add(unit)
    return held
