"""A cut that was given by hand: what it costs, and how far from the best of all cuts it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit.partition.checker import check
from autosplit.partition.clock import Clock
from autosplit.partition.problem import Problem
from autosplit.partition.solve import Objective, Partition, solve, step_lower_bound
from autosplit.planning.profiled.apply import assign
from autosplit.planning.profiled.problem import ProfiledProblem

_BOUND_S = 1.0
"""How long the solver may look for a bound: nothing but the report waits for it."""


def given(case: ProfiledProblem, cut: Mapping[str, int], recompute: Sequence[str], *, stages: int) -> Partition:
    """Return the partition that gives every operation the stage of the innermost module of ``cut`` that it lies in.

    Stages may be empty; empty ones at the end are left out. Capacities play no part: the cut is the caller's.
    ``recompute`` has one entry, or one per stage.
    """
    placed = assign(case.found.graph, cut, stages=stages)
    assignment = [placed[names[0]] for names in case.names]
    return as_given(case.problem, assignment, recompute, objective="step_time")


def as_given(
    problem: Problem, assignment: Sequence[int], recompute: Sequence[str] = ("never",), *, objective: Objective
) -> Partition:
    """Return a partition as it was given, with its costs and the solver's bound."""
    problem = replace(problem, recompute=("never",))
    used = max(assignment) + 1
    again = list(recompute) * used if len(recompute) == 1 else list(recompute[:used])
    costs = check(problem, assignment, recompute=again)
    if objective == "step_time":
        value_s, bound_s = costs.step_s, step_lower_bound(problem, stages=len(costs.lane), clock=Clock.start(_BOUND_S))
    else:
        free = replace(problem, devices=tuple(replace(own, capacity_bytes=None) for own in problem.devices or ()))
        value_s, bound_s = costs.bottleneck_s, solve(free, time_limit_s=_BOUND_S).lower_bound_s
    return Partition(
        assignment=tuple(assignment),
        objective=objective,
        value_s=value_s,
        lower_bound_s=min(bound_s, value_s),
        status="bounded",
        costs=costs,
    )
