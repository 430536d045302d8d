"""What stages of a line hold, and from that what the devices hold that have several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.line import Line

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LineBytes:
    """What stages hold under each option and the transient on top: [.., stage, option]; in the update: [.., stage].

    Of a device's stages the largest transient counts; what the optimizer holds in its step is there for all at once.
    """

    held: Floats
    transient: Floats
    step: Floats

    @classmethod
    def of(
        cls, line: Line, bounds: Ints, options: Sequence[str], *, stages: Sequence[int], in_flight: Sequence[int]
    ) -> LineBytes:
        """Return what some of the stages of cuts hold that are given by their bounds [.., stage].

        What "except_last" keeps of the last microbatch is there on all stages of a device at once.
        """
        own = np.array(stages)
        runs = bounds[..., own], bounds[..., own + 1]
        tables = [line.table(option) for option in options]
        worst = [line.table("never" if option == "except_last" else option) for option in options]
        transient = np.stack([table.transient[runs] for table in worst], axis=-1)
        fixed = np.stack([table.fixed[runs] for table in tables], axis=-1)
        each = np.stack([table.each[runs] for table in tables], axis=-1)
        held = fixed - transient + np.array(in_flight)[own, None] * each
        return cls(held, transient, tables[0].least[runs])

    def needed(self, options: Ints, *, stages: Sequence[int] | None = None) -> Floats:
        """Return what a device needs whose stages take these options; by default it has all of them."""
        own = np.arange(self.step.shape[-1]) if stages is None else np.array(stages)
        moving = self.held[..., own, options].sum(axis=-1) + self.transient[..., own, options].max(axis=-1)
        needed: Floats = np.maximum(moving, self.step[..., own].sum(axis=-1))
        return needed
