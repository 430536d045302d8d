"""Prints the cuts of many problems, so that runs of several processes can be compared: same input, same cut.

python -m tests.partition.oracle_repeat
"""

from __future__ import annotations

from collections.abc import Iterator

from autosplit.errors import InfeasibleError
from autosplit.partition.problem import Problem
from autosplit.partition.solve import solve
from tests.partition.oracle_brute import most_stages
from tests.partition.oracle_problems import Mix, limited, random_problem


def problems() -> Iterator[tuple[Problem, int]]:
    """Yield problems with many equally good cuts, features mixed, and how many stages to cut them into."""
    for seed in range(10):
        count = 8 + seed // 2
        problem = random_problem(seed, Mix(count, colours=0.2, unordered=0.1, zero=0.5, static=True))
        stages = most_stages(problem, stages=2 + seed % 3)
        if seed % 2:
            even = tuple(index * stages // count for index in range(count))
            problem = limited(problem, seed, assignment=even, stages=stages)
        yield problem, stages


def cuts() -> Iterator[str]:
    """Yield each problem's cut, its value and bound to the last bit, or what says that there is none."""
    for problem, stages in problems():
        for limit in (20_000, 50):
            try:
                found = solve(problem, stages=stages, ideal_limit=limit)
                yield f"{found.assignment} {found.value_s!r} {found.gap!r}"
            except InfeasibleError as error:
                yield str(error)


if __name__ == "__main__":
    print("\n".join(cuts()))
