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
from autosplit.partition.graph import base_graph
from autosplit.partition.infeasible import over_capacity
from autosplit.partition.problem import Problem
from autosplit.partition.solve import Partition, Status, solve, solve_evenly
from autosplit.partition.step_bound import simple_bound
from autosplit.planning.between import INSIDE, WIDE, Pieces, in_pieces, note_on_inside, pieces_of
from autosplit.planning.given import given
from autosplit.planning.plan import Plan
from autosplit.planning.profiled_problem import ProfiledProblem, prepare_scheduled
from autosplit.planning.recompute import fastest_that_fits, solve_listed
from autosplit.planning.writer import Writer
from autosplit.trace.ladder import Trace

_ROUNDS = 16
"""How often the solver is given less room before the most even use of memory is taken."""


def make_plan(model: nn.Module, found: Trace, options: Options, *, sizes: tuple[int, ...]) -> Plan:
    """Return the plan with the shortest simulated step for microbatches of the given sizes.

    Raises InfeasibleError when the memory limit cannot hold; warns when there are fewer separable nodes than devices.
    """
    case = prepare_scheduled(model, found, options, sizes=sizes)
    try:
        return _planned(case, found, options)
    except InfeasibleError:
        whole = _with_reserve(case)
        if whole is case:
            raise
    return _planned(whole, found, options)


def _with_reserve(case: ProfiledProblem) -> ProfiledProblem:
    """Return the case in which devices may also use what they keep in reserve; itself where there is none."""
    devices, options = case.problem.devices or (), case.options
    whole = tuple(replace(own, capacity_bytes=options.capacity_bytes(lane)) for lane, own in enumerate(devices))
    if whole == devices:
        return case
    return replace(case, problem=replace(case.problem, devices=whole))


def _planned(case: ProfiledProblem, found: Trace, options: Options) -> Plan:
    if options.cut is not None:
        again = options.recompute or ("never",)
        stages = len(options.devices)
        return Writer(case, given(case, options.cut, again, stages=stages)).plan()
    writer, notes = _found(case, options)
    if case.warning is not None:
        warnings.warn(case.warning, UserWarning, stacklevel=3)
    return writer.plan(*notes)


def _found(case: ProfiledProblem, options: Options) -> tuple[Writer, list[str]]:
    """Return the best cut where cuts may fall, and what is to be said of that."""
    if options.cut_between != "modules":
        return _fastest(case, case.problem), []
    pieces = pieces_of(case, base_graph(case.problem).group_of)
    writer, longer = _between_modules(case, pieces)
    note = note_on_inside(pieces.modules, writer.partition.assignment, longer=longer)
    return writer, [note] if note else []


def _between_modules(case: ProfiledProblem, pieces: Pieces) -> tuple[Writer, float | None]:
    """Return the best cut between modules, at narrow places where that gains `INSIDE`, or anywhere, for `WIDE`.

    And how much longer the step is between modules; None where there is no such cut.
    """
    stages = len(case.problem.devices or ()) * case.problem.virtual_stages
    lower_s = simple_bound(case.problem, stages=stages)
    best: Writer | None = None
    steps: list[float | None] = []
    for own, gain in ((pieces.modules, 0.0), (pieces.narrow, INSIDE), (None, WIDE)):
        if best is not None and _step_s(best) <= lower_s / (1 - gain):
            break
        with contextlib.suppress(InfeasibleError):
            if own is None or max(own) + 1 >= stages:
                found = _fastest(case, case.problem if own is None else in_pieces(case.problem, own))
                lower_s = max(lower_s, found.partition.lower_bound_s) if own is None else lower_s
                best = found if best is None or _step_s(found) < _step_s(best) * (1 - gain) else best
        steps.append(None if best is None else _step_s(best))
    if best is None:
        return _fastest(case, case.problem), None
    step_s = _step_s(best)
    lower_s = min(lower_s, step_s)
    status: Status = "optimal" if step_s <= lower_s * (1 + 1e-9) else "bounded"
    best.partition = replace(best.partition, lower_bound_s=lower_s, status=status)
    return best, None if steps[0] is None else steps[0] / step_s - 1


def _step_s(writer: Writer) -> float:
    return writer.partition.costs.step_s


def _fastest(case: ProfiledProblem, problem: Problem) -> Writer:
    """Return the fastest cut of a case's problem, or of one like it, among the ways to recompute that fit."""
    recompute = case.options.recompute

    def written(partition: Partition) -> Writer:
        return Writer(case, partition)

    def cut(way: tuple[str, ...]) -> Writer:
        if len(set(way)) > 1 and recompute is not None:
            return _listed(problem, written, way)
        return _cut(replace(problem, recompute=way), written)

    return fastest_that_fits(recompute, cut, least_s=lambda: _least_s(problem))


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
