"""Profile, solve, simulate: the plan for one model on given devices."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

from torch import nn

from autosplit.errors import InfeasibleError
from autosplit.options import Options
from autosplit.partition.infeasible import over_capacity
from autosplit.partition.problem import Problem
from autosplit.partition.solve import Partition, solve, solve_evenly
from autosplit.planning.case import Case, prepare
from autosplit.planning.given import given
from autosplit.planning.plan import Plan
from autosplit.planning.recompute import fastest_that_fits, solve_listed
from autosplit.planning.writer import Writer
from autosplit.trace.ladder import Trace

_ROUNDS = 16
"""How often the solver is given less room before the most even use of memory is taken."""


def make_plan(model: nn.Module, found: Trace, options: Options, *, sizes: tuple[int, ...]) -> Plan:
    """Return the plan with the shortest simulated step for microbatches of the given sizes.

    Raises InfeasibleError when the memory limit cannot hold; warns when there are fewer separable nodes than devices.
    """
    case = prepare(model, found, options, sizes=sizes)
    try:
        return _planned(case, found, options)
    except InfeasibleError:
        whole = _with_reserve(case)
        if whole is case:
            raise
    return _planned(whole, found, options)


def _with_reserve(case: Case) -> Case:
    """Return the case in which devices may also use what they keep in reserve; itself where there is none."""
    devices, options = case.problem.devices or (), case.options
    whole = tuple(replace(own, capacity_bytes=options.capacity_bytes(lane)) for lane, own in enumerate(devices))
    if whole == devices:
        return case
    return replace(case, formulation=replace(case.formulation, problem=replace(case.problem, devices=whole)))


def _planned(case: Case, found: Trace, options: Options) -> Plan:
    def written(partition: Partition) -> Writer:
        return Writer(case, partition)

    def cut(recompute: tuple[str, ...]) -> Writer:
        if options.cut is not None:
            stages = len(options.devices)
            return written(given(found.graph, case.formulation, options.cut, recompute, stages=stages))
        if len(set(recompute)) > 1 and options.recompute is not None:
            return _listed(case.problem, written, recompute)
        return _cut(replace(case.problem, recompute=recompute), written)

    writer = fastest_that_fits(options.recompute, cut, least_s=lambda: _least_s(case.problem))
    if case.warning is not None and options.cut is None:
        warnings.warn(case.warning, UserWarning, stacklevel=2)
    return writer.plan()


def _least_s(problem: Problem) -> float:
    """Return the step of the best cut where nothing is recomputed and no limit holds: no other step is shorter."""
    devices = tuple(replace(own, capacity_bytes=None) for own in problem.devices or ())
    return solve(replace(problem, devices=devices, recompute=("never",)), objective="step_time").costs.step_s


def _cut(problem: Problem, written: Callable[[Partition], Writer]) -> Writer:
    """Return the best partition whose replayed peaks fit too.

    The solver's formula leaves out what a replay sees; where a peak comes out above its capacity, the solver is given
    as much less. When it finds nothing any more, the most even use of memory is taken if it fits. Raises
    InfeasibleError with the replayed peaks of that when it does not.
    """
    limits = problem.capacity_bytes
    if limits is None:
        return written(solve(problem, objective="step_time"))
    room = list(limits)
    with contextlib.suppress(InfeasibleError):
        for _ in range(_ROUNDS):
            devices = [replace(own, capacity_bytes=left) for own, left in zip(problem.devices or (), room, strict=True)]
            writer = written(solve(replace(problem, devices=tuple(devices)), objective="step_time"))
            if not writer.over_capacity():
                return writer
            room = [_less(*each) for each in zip_longest(room, writer.peaks(), limits)]
    even = written(solve_evenly(problem))
    if even.over_capacity():
        raise over_capacity(problem, even.partition.assignment, stage_bytes=even.peaks())
    return even


def _listed(problem: Problem, written: Callable[[Partition], Writer], recompute: tuple[str, ...]) -> Writer:
    """Return a cut for stages that recompute as listed; raises InfeasibleError where that does not fit."""
    writer = written(solve_listed(problem, recompute))
    if writer.over_capacity():
        raise over_capacity(problem, writer.partition.assignment, stage_bytes=writer.peaks())
    return writer


def _less(room: int | None, peak: int | None, limit: int | None) -> int | None:
    """Return the room of a stage less what its peak was over its limit; there may be fewer stages than limits."""
    if room is None or limit is None or peak is None:
        return room
    return max(1, room - max(0, peak - limit))
