"""The partition as a mixed integer program for HiGHS: stages of up to about 40 works that hold static bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autosplit.partition.problem import Problem
from tests.partition.oracle_costs import Rules, flows


@dataclass(frozen=True)
class Answer:
    """What HiGHS says: ``proven`` where value is the optimum (infinite: nothing fits); ``lower`` holds in any case."""

    proven: bool
    value: float
    lower: float
    assignment: tuple[int, ...] | None


class _Program:
    def __init__(self) -> None:
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.cells: list[tuple[int, int, float]] = []
        self.limits: list[tuple[float, float]] = []

    def variable(self, *, upper: float = 1.0, integral: bool = False) -> int:
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.upper) - 1

    def row(self, terms: list[tuple[int, float]], *, least: float = -math.inf, most: float = math.inf) -> None:
        self.cells += [(len(self.limits), column, factor) for column, factor in terms]
        self.limits.append((least, most))

    def at_least(self, larger: int, terms: list[tuple[int, float]]) -> None:
        self.row([(larger, 1.0), *((column, -factor) for column, factor in terms)], least=0.0)

    def solve(self, *, least: int, time_limit_s: float):
        rows, columns, factors = zip(*self.cells, strict=True)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.limits), len(self.upper)))
        objective = np.zeros(len(self.upper))
        objective[least] = 1.0
        low, high = zip(*self.limits, strict=True)
        return milp(
            objective,
            integrality=self.integral,
            bounds=Bounds(0.0, self.upper),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )


def solve_milp(problem: Problem, *, stages: int, empty: bool = False, time_limit_s: float = 20.0) -> Answer:
    """Return the least bottleneck into ``stages`` stages, one on each device."""
    assert problem.virtual_stages == 1
    assert not problem.ties
    rules, program, count = Rules(problem, stages), _Program(), len(problem.works)
    top = program.variable(upper=math.inf)
    at = [[program.variable(integral=True) for _ in range(stages)] for _ in range(count)]
    for work in range(count):
        program.row([(cell, 1.0) for cell in at[work]], least=1.0, most=1.0)
    for tail, head in sorted(pair for pair in flows(problem) if pair[0] != pair[1]):
        for stage in range(stages - 1):
            early = [(cell, 1.0) for cell in at[tail][: stage + 1]]
            program.row([*early, *((cell, -1.0) for cell in at[head][: stage + 1])], least=0.0)
    for left, right in _same(problem):
        for stage in range(stages):
            program.row([(at[left][stage], 1.0), (at[right][stage], -1.0)], least=0.0, most=0.0)
    for stage in range(stages):
        column = [cells[stage] for cells in at]
        if not empty:
            program.row([(cell, 1.0) for cell in column], least=1.0)
        _limit_load(program, problem, top=top, column=column)
        if (capacity := rules.device(stage).capacity_bytes) is not None:
            sizes = [float(work.static_bytes) for work in problem.works]
            program.row(list(zip(column, sizes, strict=True)), most=float(capacity))
    return _answer(program.solve(least=top, time_limit_s=time_limit_s), at=at)


def _answer(result, *, at: list[list[int]]) -> Answer:
    if result.status == 2:
        return Answer(proven=True, value=math.inf, lower=math.inf, assignment=None)
    lower = -math.inf if result.mip_dual_bound is None else float(result.mip_dual_bound)
    if result.x is None:
        return Answer(proven=False, value=math.inf, lower=lower, assignment=None)
    assignment = tuple(int(np.argmax(result.x[cells])) for cells in at)
    return Answer(proven=result.status == 0, value=float(result.fun), lower=lower, assignment=assignment)


def _same(problem: Problem) -> list[tuple[int, int]]:
    first: dict[object, int] = {}
    pairs = [
        (first.setdefault(w.colocation_group, index), index)
        for index, w in enumerate(problem.works)
        if w.colocation_group is not None
    ]
    return [(left, right) for left, right in pairs if left != right]


def _limit_load(program: _Program, problem: Problem, *, top: int, column: list[int]) -> None:
    """Demand that what is made least is at least the stage's load; a net costs it that it cuts."""
    terms = [(column[index], work.forward_s + work.backward_s) for index, work in enumerate(problem.works)]
    for net in problem.nets:
        cut = program.variable()
        for end in set(net.consumers) - {net.producer}:
            for sign in (1.0, -1.0):
                program.at_least(cut, [(column[end], sign), (column[net.producer], -sign)])
        terms.append((cut, net.forward_s + net.backward_s))
    program.at_least(top, terms)
