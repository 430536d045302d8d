"""The gradients of one replica of a stage, added up over its microbatches by its own lane.

    replica 0    microbatches 0, 2, 4   a sum, in this order ─┐
    replica 1    microbatches 1, 3      a sum, in this order ─┴─► added in the order of the replicas, when all are done

So numbers do not depend on which lane is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autosplit.runtime.ops import plus


class Held(NamedTuple):
    """A stage as one of its replicas has it, numbered from 0."""

    stage: int
    replica: int


@dataclass(slots=True)
class Sums:
    """What one replica of a stage adds up.

    Attributes:
        held: the stage and the replica.
        given: its shared values and tied parameters.
        parameters: its own parameters, and buffers that require a gradient.
        free: leaves under the loss that are no stage's.
        leaves: those of all these whose gradient is a sum over microbatches.
        totals: the sums so far by the leaf's identity.
        own: the leaves, by identity, whose sum is memory that nothing else uses.
        added: one more than the last microbatch that was added, but for what was put off.
    """

    held: Held
    given: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor]
    free: list[torch.Tensor] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    added: int = 0

    def __post_init__(self) -> None:
        self.use(self.parameters)

    def use(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add up the gradients of these parameters from now on."""
        self.parameters = parameters
        self.leaves = [leaf for leaf in (*self.given, *parameters, *self.free) if leaf.requires_grad]

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to a sum, in place where nothing else uses its memory."""
        key = id(leaf)
        if key not in self.totals:
            self.totals[key] = gradient
        elif key in self.own:
            self.totals[key] += gradient
        else:
            self.totals[key] = plus(self.totals[key], gradient)

    def take(self, made: Iterable[tuple[torch.Tensor, torch.Tensor | None]], apart: Collection[int]) -> None:
        """Keep the sums that a backward gives; to those of leaves ``apart``, by identity, what there was is added."""
        for leaf, total in made:
            if total is not None:
                before = self.totals.get(id(leaf)) if id(leaf) in apart else None
                self.totals[id(leaf)] = total if before is None else plus(before, total)


def together(
    replicas: Sequence[Sums], free: Sequence[torch.Tensor], brought: Callable[[Held, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return what replicas of a stage have added up of its parameters, of ``free``, and of its shared values.

    ``brought`` returns a replica's tensor on the device of the first. Their sums are empty afterwards.
    """
    found: list[torch.Tensor | None] = []
    for leaves in zip(*((*own.parameters, *free, *own.given) for own in replicas), strict=True):
        total: torch.Tensor | None = None
        for own, leaf in zip(replicas, leaves, strict=True):
            gradient = own.totals.pop(id(leaf), None)
            if gradient is not None:
                gradient = brought(own.held, gradient)
                total = gradient if total is None else plus(total, gradient)
        found.append(total)
    return found
