"""The cut whose simulated step is shortest: the best cut of a few lines of the graph, then moves of its groups.

A topological order lays the graph out as a line, whose best cut `LineSearch` finds.

1. The lines are the model's order, each branch to its end, every group as late as possible, and the stages of the cut
   with the least bottleneck one after the other.
2. From the best of their cuts, a group moves to a neighbouring stage, with what must move along with it, while the
   simulated step gets shorter. Then some random moves away and downhill again, as long as that brings something; the
   random numbers are the same every time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.checker import check
from autosplit.partition.goal import FOREVER, Timer
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.ideals.enumerate import some_orders
from autosplit.partition.line.coarse import coarsened, runs
from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineSearch
from autosplit.partition.problem import Problem
from autosplit.partition.step_model import StepModel

_LINES = 3
"""How many topological orders are tried as lines, the model's first."""
_UNITS = 400
"""A line has about so many units at most."""
_KICKS = 200
"""So many random moves in a row bring nothing before the search ends."""
_STRENGTH = 12
"""At most so many groups move at random before the search goes downhill again."""
_SIMULATED = 15_000_000
"""Actions that are simulated in moving groups, about: cuts times the schedule's actions."""
_CHECKED = 4
"""So many of the best moves are checked for whether they fit."""
_GAIN = 1e-9
"""What a cut must gain, as a part of the step."""

Stages = NDArray[np.int64]
"""The stage of each group."""


def least_step(
    problem: Problem, *, stages: int, empty: bool, assignment: Sequence[int], clock: Timer = FOREVER
) -> tuple[int, ...]:
    """Return the assignment with the shortest simulated step that is found, starting from a cut that fits.

    ``stages`` and ``empty`` are those of `solve`.
    """
    graph = base_graph(problem)
    count = stages if empty else min(stages, graph.size)
    cut = _Search(problem, graph, stages=count, empty=empty, clock=clock).run(assignment)
    return tuple(cut.stages[list(graph.group_of)].tolist())


@dataclass(frozen=True)
class _Cut:
    """The stages of the groups and their step."""

    stages: Stages
    step_s: float


class _Search:
    def __init__(self, problem: Problem, graph: Graph, *, stages: int, empty: bool, clock: Timer) -> None:
        self.problem, self.graph, self.stages, self.empty, self.clock = problem, graph, stages, empty, clock
        self.model = StepModel(problem, graph.group_of, stages=stages)
        self.group_of = np.array(graph.group_of)
        self.before = [sorted(tails) for tails in graph.predecessors()]
        self.after = [sorted(heads) for heads in graph.successors()]
        self.left = _SIMULATED // max(self.model.simulator.count, 1)

    def run(self, assignment: Sequence[int]) -> _Cut:
        """Return the best cut that is found from an assignment that fits."""
        start = np.zeros(self.graph.size, dtype=np.int64)
        start[self.group_of] = assignment
        cuts = [self._costed(start)]
        if self.stages <= self.graph.size:
            by_stage = np.lexsort((np.arange(len(start)), start))
            lines = [np.array(order) for order in some_orders(self.graph)[:_LINES]]
            cuts += [self._costed(cut) for line in (by_stage, *lines) if (cut := self._best_of_line(line)) is not None]
        best = min((cut for cut in cuts if cut is not None), key=lambda cut: cut.step_s)
        return self._kicked(self._downhill(best))

    def _best_of_line(self, line: NDArray[np.int64]) -> Stages | None:
        """Return the best cut of the groups in a topological order; None where none fits."""
        rank = np.argsort(line)
        on_line = replace(self.graph, group_of=tuple(rank[self.group_of].tolist()))
        coarse = coarsened(self.problem, runs(self.problem, on_line, most=max(_UNITS, 2 * self.stages)))
        if self.clock.over or len(coarse.problem.works) < self.stages:
            return None
        capacity = self.problem.capacity_bytes
        limits = None if capacity is None else [math.inf if limit is None else float(limit) for limit in capacity]
        search = LineSearch(Line(coarse.problem), coarse.problem, stages=self.stages)
        cut = search.fastest([("never",)] * self.stages, limits)
        if cut is None:
            return None
        stages = np.zeros(self.graph.size, dtype=np.int64)
        stages[self.group_of] = coarse.assignment(cut.bounds)
        return stages

    def _costed(self, stages: Stages) -> _Cut | None:
        """Return a cut with its step, None where it does not fit."""
        costs = check(self.problem, stages[self.group_of].tolist(), stages=self.stages if self.empty else None)
        pairs = zip(costs.stage_bytes, self.problem.capacity_bytes or (), strict=False)
        fits = all(limit is None or needed <= limit for needed, limit in pairs)
        return _Cut(stages, costs.step_s) if fits else None

    def _downhill(self, cut: _Cut) -> _Cut:
        """Move groups while the step gets shorter."""
        better: _Cut | None = cut
        while better is not None:
            cut = better
            better = self._better(cut)
        return cut

    def _kicked(self, best: _Cut) -> _Cut:
        """Go some random moves away and downhill again until that brings nothing."""
        chance, idle = random.Random(0), 0
        while idle < _KICKS and self.left > 0 and not self.clock.over:
            idle += 1
            stages = best.stages
            for _ in range(chance.randint(2, _STRENGTH)):
                stages = self._moved(stages, chance.randrange(self.graph.size), chance.choice((-1, 1)))
            away = self._costed(stages) if self._is_legal(stages) else None
            settled = None if away is None else self._downhill(away)
            if settled is not None and settled.step_s < best.step_s * (1 - _GAIN):
                best, idle = settled, 0
        return best

    def _better(self, cut: _Cut) -> _Cut | None:
        """Return the cut after the best move, None where no move brings anything."""
        moves = self._moves(cut.stages)
        if not moves or self.left <= 0 or self.clock.over:
            return None
        self.left -= len(moves)
        steps = self.model.steps(np.array(moves), np.zeros((len(moves), self.stages)))
        for index in np.argsort(steps, kind="stable")[:_CHECKED].tolist():
            better = self._costed(moves[index]) if steps[index] < cut.step_s * (1 - _GAIN) else None
            if better is not None and better.step_s < cut.step_s * (1 - _GAIN):
                return better
        return None

    def _moves(self, stages: Stages) -> list[Stages]:
        """Return the cuts with a group in a neighbouring stage."""
        every = (self._moved(stages, group, by) for group in range(self.graph.size) for by in (1, -1))
        legal = {moved.tobytes(): moved for moved in every if self._is_legal(moved)}
        return list(legal.values())

    def _moved(self, stages: Stages, group: int, by: int) -> Stages:
        """Return the cut with a group, and what must move along with it, in a neighbouring stage if there is one."""
        stage, along = int(stages[group]), self.after if by > 0 else self.before
        moved, waiting = stages.copy(), [group] if 0 <= stage + by < self.stages else []
        while waiting:
            current = waiting.pop()
            moved[current] = stage + by
            waiting += [other for other in along[current] if moved[other] == stage]
        return moved

    def _is_legal(self, stages: Stages) -> bool:
        return self.empty or len(set(stages.tolist())) == self.stages
