"""Cuts under memory caps that bind: 0.6 to 0.95 of the largest stage of the best cut without a cap.

    python -m benchmarks.partition_caps [--only pd_gnmt] [--random 60] [--json FILE]

On every workload file, and on random graphs whose optimum HiGHS proves (scipy comes with the `test` extra). Where no
cut is found on a workload, HiGHS is asked whether one exists: for the least possible largest stage, in bytes alone.
Seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autosplit.errors import InfeasibleError
from autosplit.partition.problem import Problem, Work, devices_of
from autosplit.partition.solve import Partition, solve
from autosplit.partition.workload import load_workload
from benchmarks import pairs
from tests.partition.oracle_brute import most_stages
from tests.partition.oracle_costs import Rules
from tests.partition.oracle_milp import Answer, solve_milp
from tests.partition.oracle_problems import Mix, random_problem

FOLDER = Path(__file__).parent / "data" / "workloads"
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6)
GAP_ASKED = 0.03
CLOSE = 1e-7
"""What HiGHS proves is exact to about this much, relatively."""


@dataclass(frozen=True)
class Line:
    """One problem under one cap.

    Attributes:
        outcome: "found"; "none exists" where that is proven; "missed" where HiGHS knows a cut; "unknown" else.
        gap: value over the solver's own lower bound, less one; None without a cut.
        above: value over the optimum that HiGHS proves, less one; None without it.
        bound: the solver's lower bound over that optimum.
    """

    name: str
    works: int
    stages: int
    share: float
    outcome: str
    uncapped: float
    value: float | None
    gap: float | None
    above: float | None
    bound: float | None
    seconds: float


def workload_lines(path: Path) -> Iterator[Line]:
    """Yield a line for each share, cutting into as many stages as the middle one of the file's usual counts."""
    workload = load_workload(path)
    stages = 3 if "l-6" in path.stem else 4 if "unet" in path.stem else 6 if path.stem.startswith("tar") else 8
    problem = replace(workload.problem(stages=stages), devices=None)
    free = solve(problem, stages=stages, empty=True)
    for share in SHARES:
        capacity = int(share * max(free.stage_bytes))
        capped = replace(problem, devices=devices_of((capacity,) * stages))
        partition, seconds = _timed(capped, stages=stages, empty=True)
        outcome = "found"
        if partition is None:
            outcome = _existence(capped, stages=stages, capacity=capacity)
        yield _line(
            path.stem, problem, partition, None, stages=stages, share=share, outcome=outcome, free=free, seconds=seconds
        )


def _existence(problem: Problem, *, stages: int, capacity: int) -> str:
    """Ask HiGHS for the least possible largest stage in bytes."""
    scale = max(work.static_bytes for work in problem.works)
    weights = tuple(
        Work(work.name, work.static_bytes / scale, 0.0, work.static_bytes, colour=work.colour) for work in problem.works
    )
    bare = Problem(weights, (), order=tuple(problem.precedence), microbatches=1)
    answer = solve_milp(bare, stages=stages, empty=True, time_limit_s=60.0)
    if answer.assignment is not None:
        used = [0] * stages
        for work, stage in zip(weights, answer.assignment, strict=True):
            used[stage] += work.static_bytes
        if max(used) <= capacity:
            return "missed"
    return "none exists" if answer.lower * scale > capacity * (1 + CLOSE) else "unknown"


def random_lines(count: int) -> Iterator[Line]:
    """Yield lines of random graphs of 15 to 40 works for which HiGHS proves both optima, or that there is no cut."""
    seed = proven = 0
    while proven < count:
        chance = random.Random(f"caps {seed}")
        mix = Mix(chance.randint(15, 40), colours=0.05, unordered=chance.choice((0.0, 0.1)), whole=False)
        problem = random_problem(seed, mix)
        stages = most_stages(problem, stages=chance.randint(2, 6))
        seed += 1
        free = solve(problem, stages=stages)
        share = chance.choice(SHARES)
        capacity = int(share * max(free.stage_bytes))
        capped = replace(problem, devices=devices_of((capacity,) * stages))
        answer = solve_milp(capped, stages=stages, time_limit_s=20.0)
        if not answer.proven:
            continue
        proven += 1
        partition, seconds = _timed(capped, stages=stages, empty=False)
        outcome = "found" if partition is not None else "missed" if answer.value < math.inf else "none exists"
        name = f"random {seed - 1}"
        yield _line(
            name, problem, partition, answer, stages=stages, share=share, outcome=outcome, free=free, seconds=seconds
        )


def _timed(problem: Problem, *, stages: int, empty: bool) -> tuple[Partition | None, float]:
    start = time.process_time()
    try:
        partition = solve(problem, stages=stages, empty=empty)
    except InfeasibleError:
        partition = None
    seconds = time.process_time() - start
    if partition is not None:
        assert Rules(problem, stages).bottleneck_s(partition.assignment) < math.inf, "a stage exceeds its cap"
    return partition, seconds


def _line(
    name: str,
    problem: Problem,
    partition: Partition | None,
    answer: Answer | None,
    *,
    stages: int,
    share: float,
    outcome: str,
    free: Partition,
    seconds: float,
) -> Line:
    known = partition is not None and answer is not None and answer.value > 0
    return Line(
        name=name,
        works=len(problem.works),
        stages=stages,
        share=share,
        outcome=outcome,
        uncapped=free.value_s,
        value=None if partition is None else partition.value_s,
        gap=None if partition is None else partition.gap,
        above=partition.value_s / answer.value - 1 if known else None,
        bound=partition.lower_bound_s / answer.value if known else None,
        seconds=seconds,
    )


def checks(workloads: Sequence[Line], graphs: Sequence[Line]) -> list[pairs.Check]:
    """Return what is asked: no cut missed, gaps of at most 3%, no bound above the optimum."""
    found = []
    for name, lines in (("workloads", workloads), ("random graphs", graphs)):
        found.append(pairs.at_most(f"{name}: cuts missed", 0, sum(line.outcome == "missed" for line in lines)))
        found.append(
            pairs.at_most(f"{name}: neither found nor refuted", 0, sum(line.outcome == "unknown" for line in lines))
        )
        gaps = [line.gap for line in lines if line.gap is not None]
        found.append(pairs.at_most(f"{name}: largest gap", GAP_ASKED, max(gaps, default=0.0)))
    above = [line.above for line in graphs if line.above is not None]
    found.append(pairs.at_most("random graphs: most above the optimum", GAP_ASKED, max(above, default=0.0)))
    bounds = [line.bound for line in graphs if line.bound is not None]
    found.append(pairs.at_most("random graphs: bound over optimum", 1 + CLOSE, max(bounds, default=0.0)))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per problem and cap, then the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--only", nargs="+", default=[""], help="workloads whose names begin so")
    parser.add_argument("--random", type=int, default=60, help="how many random graphs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    workloads = []
    for path in sorted({path for start in arguments.only for path in arguments.folder.glob(f"{start}*.json")}):
        for line in workload_lines(path):
            workloads.append(line)
            print(_text(line), flush=True)
    graphs = []
    for line in random_lines(arguments.random):
        graphs.append(line)
        print(_text(line), flush=True)
    asked = checks(workloads, graphs)
    print(pairs.checks_text(asked))
    if arguments.json:
        pairs.write(
            arguments.json,
            benchmark="partition_caps",
            settings={"shares": SHARES, "random": arguments.random, "only": arguments.only},
            machine=machine,
            figures=[asdict(line) for line in (*workloads, *graphs)],
            checks=asked,
        )


def _text(line: Line) -> str:
    head = f"{line.name:34} {line.works:5} works {line.stages:2} stages  {line.share:.2f}  {line.outcome:11}"
    if line.value is None:
        return f"{head} {line.seconds:6.1f} s"
    above = "" if line.above is None else f"  {line.above:.2%} above the optimum"
    return (
        f"{head} {line.seconds:6.1f} s  {line.value / (line.uncapped or 1):7.4f} x uncapped  gap {line.gap:.2%}{above}"
    )


if __name__ == "__main__":
    main()
