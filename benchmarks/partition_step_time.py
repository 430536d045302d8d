"""How close the solver's cuts come to the shortest simulated step that is known, and what they take to find.

    python -m benchmarks.partition_step_time [--chains 200] [--dags 52] [--json FILE]

Chains of up to 20 works are cut into 4-8 stages, M is 1, 2 or 8 times that, under GPipe and 1F1B; backwards take 0.5-4
times their forwards and transfers from 2% of a work to three works' time. Every cut is simulated, so the best known is
the best there is. The graphs have branches, skips and tensors with several consumers; where their cuts are too many to
be simulated the best known is the best of a long random search (which also starts from the solver's cut). ``gap`` is
the solver's step above the best known, ``bound_gap`` above its own lower bound. Seconds are of this process's CPU; the
bottleneck search that precedes is not among them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.ideals.enumerate import all_ideals
from autosplit.partition.line.step_time import least_step
from autosplit.partition.problem import Problem, TensorEdge, Work
from autosplit.partition.solve import solve, step_lower_bound
from autosplit.partition.step_model import StepModel

_DEAR = (0.02, 0.3, 1.0, 3.0)
_CUTS = 200_000
"""Cuts that are simulated one and all; of more a random search looks at some."""
_TRIED = 128


def chain(seed: int) -> tuple[Problem, int]:
    """Return a chain of works and into how many stages it is to be cut."""
    chance = random.Random(seed)
    stages = chance.randint(4, 8)
    count = chance.randint(stages + 3, 20 if stages < 7 else 18)
    works = _works(chance, count)
    dear = chance.choice(_DEAR) * statistics.mean(work.forward_s for work in works)
    nets = (
        TensorEdge(index, (index + 1,), chance.uniform(0, dear), chance.uniform(0, dear)) for index in range(count - 1)
    )
    return _problem(chance, works, tuple(nets), stages), stages


def dag(seed: int) -> tuple[Problem, int]:
    """Return a graph with branches and skips and into how many stages it is to be cut."""
    chance = random.Random(seed)
    stages = chance.randint(4, 8)
    count = chance.randint(stages + 4, 40)
    works = _works(chance, count)
    dear = chance.choice(_DEAR) * statistics.mean(work.forward_s for work in works)
    nets = []
    for index in range(count - 1):
        ends = {index + 1} if chance.random() < 0.7 else set()
        ends |= {min(count - 1, index + 1 + int(chance.expovariate(0.4))) for _ in range(chance.choice((0, 1, 1, 2)))}
        if chance.random() < 0.08:
            ends.add(chance.randint(index + 1, count - 1))
        if ends:
            nets.append(TensorEdge(index, tuple(sorted(ends)), chance.uniform(0, dear), chance.uniform(0, dear)))
    return _problem(chance, works, tuple(nets), stages), stages


def _works(chance: random.Random, count: int) -> tuple[Work, ...]:
    even, spread = chance.random() < 0.5, chance.choice((0.2, 0.7, 1.2))
    found = []
    for index in range(count):
        forward_s = chance.lognormvariate(0, spread)
        found.append(Work(f"w{index}", forward_s, forward_s * (2.0 if even else chance.uniform(0.5, 4))))
    return tuple(found)


def _problem(chance: random.Random, works: tuple[Work, ...], nets: tuple[TensorEdge, ...], stages: int) -> Problem:
    times = chance.choice((1, 2, 8))
    return Problem(works, nets, microbatches=stages * times, schedule=chance.choice(("gpipe", "1f1b")))


def every_cut(graph: Graph, stages: int) -> list[tuple[int, ...]] | None:
    """Return the chains of ideals that cut the graph into so many non-empty stages, None when they are too many."""
    ideals = all_ideals(graph, limit=2_000)
    if ideals is None:
        return None
    ideals.sort(key=int.bit_count)
    larger = {one: [other for other in ideals if other != one and other & one == one] for one in ideals}
    counts = {ideal: [0] * (stages + 1) for ideal in ideals}
    counts[ideals[-1]][0] = 1
    for ideal in reversed(ideals[:-1]):
        for other in larger[ideal]:
            for left in range(stages):
                counts[ideal][left + 1] += counts[other][left]
    if counts[0][stages] > _CUTS:
        return None
    chains = [(0,)]
    for left in range(stages - 1, -1, -1):
        chains = [(*one, other) for one in chains for other in larger[one[-1]] if counts[other][left]]
    return chains


def best_of_all(model: StepModel, chains: Sequence[tuple[int, ...]]) -> float:
    """Return the shortest step of the chains."""
    best = np.inf
    for low in range(0, len(chains), 4096):
        inner = [chain[1:-1] for chain in chains[low : low + 4096]]
        stage_of = [
            [sum(not ideal >> group & 1 for ideal in each) for group in range(model.graph.size)] for each in inner
        ]
        best = min(best, _least(model, np.array(stage_of)))
    return float(best)


def random_search(model: StepModel, stages: int, *, seed: int, start: Sequence[int], starts: int) -> float:
    """Return the shortest step met when random works move to neighbouring stages while that helps, from many starts."""
    chance = np.random.default_rng(seed)
    best = _climb(model, stages, np.array(start), chance)
    for _ in range(starts):
        best = min(best, _climb(model, stages, _random_cut(model, stages, chance), chance))
    return best


def _random_cut(model: StepModel, stages: int, chance: np.random.Generator) -> np.ndarray:
    graph = model.graph
    before = graph.predecessors()
    order: list[int] = []
    while len(order) < graph.size:
        ready = [group for group in range(graph.size) if group not in order and before[group] <= set(order)]
        order.append(min(ready, key=lambda group: group + chance.exponential(4)))
    passed = np.cumsum([graph.times_s[group] for group in order]) / sum(graph.times_s)
    share = np.cumsum(chance.dirichlet(np.full(stages, 30.0)))[:-1]
    cuts = np.clip(np.searchsorted(passed, share), np.arange(1, stages), graph.size - stages + np.arange(1, stages))
    cuts = np.maximum.accumulate(cuts - np.arange(stages - 1)) + np.arange(stages - 1)
    stage_of = np.zeros(graph.size, dtype=np.int64)
    stage_of[order] = (np.arange(graph.size)[:, None] >= cuts).sum(axis=1)
    return stage_of


def _climb(model: StepModel, stages: int, stage_of: np.ndarray, chance: np.random.Generator) -> float:
    edges = np.array(sorted(model.graph.edges))
    best, idle = _least(model, stage_of[None]), 0
    while idle < 25:
        moved = np.repeat(stage_of[None], _TRIED, axis=0)
        for part in range(3):
            rows = np.flatnonzero(chance.random(_TRIED) < 1 / (1 + part))
            works = chance.integers(0, len(stage_of), len(rows))
            moved[rows, works] = np.clip(moved[rows, works] + chance.choice((-1, 1), len(rows)), 0, stages - 1)
        legal = (moved[:, edges[:, 0]] <= moved[:, edges[:, 1]]).all(axis=1)
        legal &= (moved[:, :, None] == np.arange(stages)).any(axis=1).all(axis=1)
        moved = moved[legal]
        steps = model.steps(moved, np.zeros((len(moved), stages)))
        idle += 1
        if len(steps) and steps.min() < best * (1 - 1e-12):
            best, stage_of, idle = float(steps.min()), moved[int(steps.argmin())], 0
    return best


def _least(model: StepModel, stage_of: np.ndarray) -> float:
    return float(model.steps(stage_of, np.zeros((len(stage_of), model.stages))).min())


def measure(kind: str, seed: int, *, starts: int) -> dict[str, Any]:
    """Return what one case came to."""
    problem, stages = (chain if kind == "chain" else dag)(seed)
    bottleneck = solve(problem, stages=stages)
    order = tuple(range(stages))
    began = time.process_time()
    found = least_step(problem, stages=stages, empty=False, assignment=bottleneck.assignment, order=order)
    lower_s = step_lower_bound(problem, stages=stages)
    seconds = time.process_time() - began
    graph = base_graph(problem)
    model = StepModel(problem, graph, stages=stages)
    if kind == "chain":
        size = graph.size
        chains = [
            tuple((1 << cut) - 1 for cut in (0, *cuts, size))
            for cuts in itertools.combinations(range(1, size), stages - 1)
        ]
    else:
        chains = every_cut(graph, stages) or []
    best = best_of_all(model, chains) if chains else np.inf
    if not chains:
        best = random_search(model, stages, seed=seed, start=found.assignment, starts=starts)
    assert lower_s <= min(best, found.step_s) * (1 + 1e-9), f"{kind} {seed}: a wrong bound"
    return {
        "kind": kind,
        "seed": seed,
        "works": len(problem.works),
        "stages": stages,
        "microbatches": problem.microbatches,
        "schedule": problem.schedule,
        "exhaustive": bool(chains),
        "gap": max(0.0, found.step_s / best - 1),
        "bottleneck_gap": bottleneck.costs.step_s / best - 1,
        "bound_gap": found.step_s / lower_s - 1,
        "seconds": seconds,
    }


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distribution of some cases."""
    gaps = [case["gap"] for case in cases]
    return {
        "cases": len(cases),
        "exhaustive": sum(case["exhaustive"] for case in cases),
        "gap_max": max(gaps),
        "gap_mean": statistics.mean(gaps),
        "share_exact": sum(gap < 1e-9 for gap in gaps) / len(gaps),
        "bottleneck_gap_max": max(case["bottleneck_gap"] for case in cases),
        "bottleneck_gap_mean": statistics.mean(case["bottleneck_gap"] for case in cases),
        "proven": sum(case["bound_gap"] <= 1e-9 for case in cases) / len(cases),
        "bound_gap_max": max(case["bound_gap"] for case in cases),
        "bound_gap_mean": statistics.mean(case["bound_gap"] for case in cases),
        "seconds_max": max(case["seconds"] for case in cases),
        "seconds_mean": statistics.mean(case["seconds"] for case in cases),
    }


def groups(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distributions by kind, schedule and microbatches per stage."""
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        times = case["microbatches"] // case["stages"]
        for name in (f"{case['kind']} all", f"{case['kind']} {case['schedule']} M={times}N"):
            found.setdefault(name, []).append(case)
    return {name: summary(own) for name, own in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--dags", type=int, default=52)
    parser.add_argument("--starts", type=int, default=3, help="random starts where not every cut is simulated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = [("dag", seed) for seed in range(options.dags)] + [("chain", seed) for seed in range(options.chains)]
    cases: list[dict[str, Any]] = []
    for kind, seed in wanted:
        cases.append(measure(kind, seed, starts=options.starts))
        result = {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "starts": options.starts,
            "groups": groups(cases),
            "cases": cases,
        }
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, own in result["groups"].items():
        print(
            f"{name:20} {own['cases']:4} cases  gap max {own['gap_max']:.3%} mean {own['gap_mean']:.4%} "
            f"exact {own['share_exact']:.0%}  bound mean {own['bound_gap_mean']:.2%} proven {own['proven']:.0%}  "
            f"bottleneck's {own['bottleneck_gap_mean']:.2%}  {own['seconds_mean']:.2f} s, {own['seconds_max']:.1f} s"
        )


if __name__ == "__main__":
    main()
