"""What the stages of a plan do again in their backward: what is asked for, or the least that the memory asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autosplit.errors import InfeasibleError
from autosplit.partition.costs import check
from autosplit.partition.problem import RECOMPUTE, Problem, again_share
from autosplit.partition.solve import Partition, solve
from autosplit.planning.writer import Writer

_ALIKE = 1e-6
"""Steps are alike that differ by less."""


def ways(asked: Sequence[str] | None) -> Iterator[tuple[str, ...]]:
    """Yield what the solver may choose among per stage; None: "auto".

    The solver's formula and the replayed peaks may differ by block or by stage, so each is also tried alone.
    """
    if asked is not None:
        yield tuple(asked)
        return
    yield ("never",)
    yield RECOMPUTE
    yield ("always",)
    yield ("block",)


def fastest_that_fits(
    asked: Sequence[str] | None, cut: Callable[[tuple[str, ...]], Writer], *, least_s: Callable[[], float]
) -> Writer:
    """Return the answer with the shortest step; raises the InfeasibleError of the way that would need the least.

    ``least_s`` returns a step that none is shorter than: an answer that reaches it ends the search.
    """
    errors: list[InfeasibleError] = []
    best: Writer | None = None
    shortest_s: float | None = None
    for way in ways(asked):
        try:
            found = cut(way)
        except InfeasibleError as error:
            errors.append(error)
            continue
        if best is None or found.partition.costs.step_s < best.partition.costs.step_s:
            best = found
        if asked is not None or found.case.problem.capacity_bytes is None:
            break
        shortest_s = least_s() if shortest_s is None else shortest_s
        if best.partition.costs.step_s <= shortest_s * (1 + _ALIKE):
            break
    if best is not None:
        return best
    raise min(errors, key=lambda error: float("inf") if error.smallest_bytes is None else error.smallest_bytes)


def solve_listed(problem: Problem, recompute: Sequence[str]) -> Partition:
    """Return a cut for stages that recompute as listed, whatever they need.

    A device whose stages do forwards again counts as a slower one, by the model's own share of the forward. The bound
    is that of any cut that recomputes nothing.
    """
    devices = [replace(device, capacity_bytes=None) for device in problem.devices or ()]
    free = replace(problem, devices=tuple(devices), recompute=("never",))
    forward_s = sum(work.forward_s for work in problem.works)
    both_s = forward_s + sum(work.backward_s for work in problem.works)
    part = forward_s / both_s if both_s else 0.0
    lane = problem.lanes(len(recompute))
    again = [again_share(option, microbatches=problem.microbatches) for option in recompute]
    slowed = []
    for place, device in enumerate(devices):
        own = [share for share, at in zip(again, lane, strict=True) if at == place]
        slowed.append(replace(device, slowdown=1 + part * sum(own) / len(own)))
    found = solve(replace(free, devices=tuple(slowed)), objective="step_time")
    bound_s = solve(free, objective="step_time").lower_bound_s
    costs = check(problem, found.assignment, recompute=recompute[: found.stages])
    value_s = costs.step_s
    return replace(found, value_s=value_s, lower_bound_s=min(bound_s, value_s), status="bounded", costs=costs)
