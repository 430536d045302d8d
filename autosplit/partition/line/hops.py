"""What values take from stage to stage of a line, told from the boundaries next to each cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.line.line import Line
from autosplit.partition.step_model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NETS = 16
"""Nets of a boundary that are counted, the longest: without the others a bound is only lower."""


class Hops:
    """The nets that cross each boundary of a line: where they come from, and who takes them first behind it."""

    def __init__(self, line: Line, model: StepModel) -> None:
        rows: list[list[tuple[float, ...]]] = [[] for _ in range(line.size + 1)]
        own = model.crossings
        members: dict[int, list[int]] = {}
        for row, net in enumerate(own.net.tolist()):
            members.setdefault(net, []).append(row)
        for same in members.values():
            producer = int(own.producer[same[0]])
            there_s, back_s = float(own.forward_s[same[0]]), float(own.backward_s[same[0]])
            behind = producer + 1
            for consumer in sorted(own.consumer[same].tolist()):
                for bound in range(behind, consumer + 1):
                    rows[bound].append((there_s + back_s, producer, consumer, there_s, back_s))
                behind = max(behind, consumer + 1)
        kept = [sorted(each, reverse=True)[:_NETS] for each in rows]
        self.width = max(1, max(map(len, kept)))
        table = np.zeros((line.size + 1, self.width, 5))
        for bound, each in enumerate(kept):
            table[bound, : len(each)] = np.array(each).reshape(-1, 5)
        self.producer, self.consumer = table[:, :, 1].astype(np.int64), table[:, :, 2].astype(np.int64)
        self.there_s, self.back_s = table[:, :, 3].copy(), table[:, :, 4].copy()
        tail = np.arange(model.stages - 1)
        self.link: Floats = model.link[tail, tail + 1] * model.simulator.travels[tail, tail + 1]

    def of(self, before: Ints, at: Ints, behind: Ints) -> tuple[Floats, Floats]:
        """Return what values take to the next stage, and gradients back, at least: [.., boundary] each.

        Boundaries lie at ``at``, the ones before and behind each of them where the others say.
        """
        crosses = (self.producer[at] >= before[..., None]) & (self.consumer[at] < behind[..., None])
        there_s, back_s = ((crosses * each[at]).sum(axis=-1) * self.link for each in (self.there_s, self.back_s))
        return there_s, back_s

    def moved(self, bounds: Ints, shifted: Ints) -> MovedHops:
        """Return the hops of a cut after moves of rows of its boundaries; ``shifted`` has the bounds by each step."""
        still, last = np.broadcast_to(bounds, shifted.shape), len(bounds) - 1
        sides: dict[str, tuple[Ints, Ints, Ints]] = {
            "none": (still, still, still),
            "all": (shifted, shifted, shifted),
            "at": (still, shifted, still),
            "first": (still, shifted, shifted),
            "last": (shifted, shifted, still),
            "before": (still, still, shifted),
            "behind": (shifted, still, still),
        }
        found = {}
        for name, (before, at, behind) in sides.items():
            found[name] = np.zeros((2, len(shifted), last + 1))
            found[name][:, :, 1:-1] = self.of(before[:, :-2], at[:, 1:-1], behind[:, 2:])
        return MovedHops(found)


@dataclass(frozen=True)
class MovedHops:
    """What goes over each boundary, there and back, by which of it and its neighbours moved: [way, step, boundary]."""

    taken: Mapping[str, Floats]

    def along(self, counts: Floats, start: Ints, stop: Ints, by: Ints) -> Floats:
        """Return what paths' hops take after moves from boundary ``start`` to before ``stop``, by the ``by``-th step.

        ``counts`` is per path how often it takes each hop, there and then back. The result is [path, move].
        """
        ways = np.zeros((len(counts), 2, 1, next(iter(self.taken.values())).shape[2]))
        ways[:, :, 0, 1:-1] = counts.reshape(len(counts), 2, -1)
        taken = {name: (own * ways).sum(axis=1) for name, own in self.taken.items()}
        none, every = (running_sums(taken[name]) for name in ("none", "all"))
        alone, end = stop == start + 1, none.shape[2] - 1
        found = none[:, by, start - 1] + none[:, by, -1] - none[:, by, np.minimum(stop + 1, end)]
        found += np.where(alone, 0.0, every[:, by, stop - 1] - every[:, by, start + 1])
        found += taken["before"][:, by, start - 1] + taken["behind"][:, by, stop]
        several = taken["first"][:, by, start] + taken["last"][:, by, stop - 1]
        found += np.where(alone, taken["at"][:, by, start], several)
        return found


def running_sums(each: Floats) -> Floats:
    """Return sums over the places before each: [.., places + 1]."""
    return np.concatenate([np.zeros((*each.shape[:-1], 1)), each.cumsum(axis=-1)], axis=-1)
