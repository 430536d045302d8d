"""One minibatch in flight: the cells of its stages, each of which computes with its own version of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.lower.split import named_state
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import CallState, transfer
from autosplit.runtime.step.step import Step
from autosplit.runtime.step.sums import Held, together
from autosplit.runtime.step.train_cells import TrainCells
from autosplit.stream.lowering import Ways
from autosplit.stream.minibatches import StreamStep
from autosplit.stream.optimizers import Settings


class Minibatch:
    """One minibatch in flight."""

    def __init__(self, cells: StreamCells, settings: Mapping[int, Settings], ways: Ways) -> None:
        """``cells`` run its stages; ``settings`` are options as it came in, by the identity of their optimizer."""
        self.cells, self.settings, self.ways = cells, settings, ways
        self.microbatches = len(cells.step.sizes)
        self.open = [self.microbatches] * len(ways.sources)
        """How many forwards of each stage are not over."""
        stages = cells.step.stages
        self.left = len(stages) + sum(len(cells.step.every_lane[stage]) for stage in stages)
        """How many stages of this process have not stepped by it, and how many of their lanes do not know of it."""


class StreamCells(TrainCells):
    """The cells of one minibatch: every stage computes with that version of its weights which is the minibatch's."""

    step: StreamStep

    def _trained(self, step: Step) -> Mapping[Held, Sequence[torch.Tensor]]:
        """Return none: each stage says which version it computes with."""
        return {}

    def _split_stages(self) -> set[int]:
        """Return none: a stream's backwards are whole."""
        return set()

    def state(self, stage: int) -> CallState:
        """Return a stage's state, with what the norms of all its replicas saw."""
        first, *others = (Held(stage, replica) for replica in range(len(self.step.every_lane[stage])))
        state = self.step.state_of(first)
        self.step.add_statistics(state, {held: self.step.state_of(held) for held in others})
        return state

    def named(self) -> dict[str, torch.Tensor]:
        """Return the model's state by name, where norms take statistics of it."""
        return dict(named_state(self.lowered.traced.root) if self.lowered.counts else ())

    def end_forwards(self, stage: int) -> None:
        """Update a stage's running statistics, when its last forward is over."""
        if self.lowered.counts:
            update_statistics(self.state(stage), self.step.stage_lanes)

    def gradients(self, stage: int, lane: Lane) -> list[torch.Tensor | None]:
        """Return the gradients of a stage's weights on a lane, and let go of both."""
        used = [sums for sums in self.replicas(stage) if sums.leaves]
        for sums in used:
            transfer(tuple(sums.totals()), self.step.lane_of(sums.held), lane)  # on one device: it waits for them
        return together(used, (), self.step.brought)
