"""Cuts for devices of two kinds, one twice as slow, against brute force and against cuts that ignore the difference.

    python -m benchmarks.partition_uneven [--small 60] [--only pd_] [--json FILE]

Small random graphs: the largest load, and the simulated step, over every assignment and every order of the devices.
Published profiles: a cut for equal devices is what a solver would give that does not know them; its stages then get
the devices in the order given, or, where the order is free, the fastest device for the heaviest stage.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autosplit.partition.costs import check
from autosplit.partition.problem import Device
from autosplit.partition.solve import Objective, solve
from autosplit.partition.workload import load_workload
from benchmarks import pairs
from tests.partition.oracle_brute import brute_force, brute_force_step, most_stages
from tests.partition.oracle_problems import Mix, random_problem

FOLDER = Path(__file__).parent / "data" / "workloads"
FAST, SLOW = Device(1.0), Device(2.0)
ABOVE_ASKED = 0.01
STAGES = 8
MICROBATCHES = 16
OBJECTIVES: tuple[Objective, ...] = ("bottleneck", "step_time")


@dataclass(frozen=True)
class Small:
    """A small graph: what the solver found over what brute force found, less one."""

    seed: int
    works: int
    stages: int
    objective: str
    free_order: bool
    above: float
    status: str


@dataclass(frozen=True)
class Profile:
    """A published profile; ``ignoring`` is the value, on the uneven devices, of the best cut for equal ones."""

    name: str
    objective: str
    free_order: bool
    value: float
    lower_bound: float
    ignoring: float
    seconds: float

    @property
    def times_faster(self) -> float:
        """How many times longer the cut that ignores the difference takes."""
        return self.ignoring / self.value


def small_cases(count: int) -> Iterator[Small]:
    """Yield random graphs of up to 8 works on 2 to 4 devices, both kinds among them."""
    for seed in range(count):
        chance = random.Random(f"uneven {seed}")
        problem = random_problem(seed, Mix(chance.randint(4, 8), zero=0.1, whole=False))
        stages = most_stages(problem, stages=chance.randint(2, 4))
        kinds = [FAST, SLOW, *(chance.choice((FAST, SLOW)) for _ in range(2))][:stages]
        chance.shuffle(kinds)
        for free_order in (False, True):
            uneven = replace(problem, devices=tuple(kinds), free_order=free_order)
            for objective, oracle in zip(OBJECTIVES, (brute_force, brute_force_step), strict=True):
                best = oracle(uneven, stages=stages)
                found = solve(uneven, stages=stages, objective=objective)
                above = found.value_s / best.value - 1 if best.value else 0.0
                yield Small(seed, len(problem.works), stages, objective, free_order, above, found.status)


def profile_cases(path: Path) -> Iterator[Profile]:
    """Yield a published profile on four fast and four slow devices, in turn and in free order."""
    problem = load_workload(path).problem(stages=STAGES, microbatches=MICROBATCHES)
    problem = replace(problem, devices=None)
    devices = (FAST, SLOW) * (STAGES // 2)
    for objective in OBJECTIVES:
        equal = solve(problem, stages=STAGES, objective=objective)
        for free_order in (False, True):
            uneven = replace(problem, devices=devices, free_order=free_order)
            start = time.process_time()
            found = solve(uneven, stages=STAGES, objective=objective)
            seconds = time.process_time() - start
            costs = check(
                uneven, equal.assignment, order=_heaviest_fastest(equal.loads_s, devices) if free_order else None
            )
            ignoring = costs.bottleneck_s if objective == "bottleneck" else costs.step_s
            yield Profile(path.stem, objective, free_order, found.value_s, found.lower_bound_s, ignoring, seconds)


def _heaviest_fastest(loads_s: Sequence[float], devices: Sequence[Device]) -> tuple[int, ...]:
    """Return the order of devices that gives the heaviest stages the fastest."""
    by_speed = sorted(range(len(devices)), key=lambda index: devices[index].slowdown)
    order = [0] * len(loads_s)
    for stage, device in zip(sorted(range(len(loads_s)), key=lambda stage: -loads_s[stage]), by_speed, strict=False):
        order[stage] = device
    return tuple(order)


def checks(small: Sequence[Small], profiles: Sequence[Profile]) -> list[pairs.Check]:
    """Return what is asked: within 1% of brute force; on a profile, faster than the cut that ignores the difference."""
    found = []
    for objective in OBJECTIVES:
        for free_order in (False, True):
            order = "free" if free_order else "fixed"
            above = [case.above for case in small if (case.objective, case.free_order) == (objective, free_order)]
            found.append(
                pairs.at_most(f"{objective}, {order} order: above brute force", ABOVE_ASKED, max(above, default=0.0))
            )
            own = [case for case in profiles if (case.objective, case.free_order) == (objective, free_order)]
            faster = max((case.times_faster for case in own), default=0.0)
            found.append(pairs.at_least(f"{objective}, {order} order: times faster on a profile", 1.0 + 1e-6, faster))
            worst = min((case.times_faster for case in own), default=0.0)
            found.append(pairs.at_least(f"{objective}, {order} order: on every profile no slower", 1.0 - 1e-9, worst))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the small cases that miss, a table of the profiles, and the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--only", nargs="+", default=["pd_"], help="profiles whose names begin so")
    parser.add_argument("--small", type=int, default=60, help="how many small graphs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    small = list(small_cases(arguments.small))
    missed = [case for case in small if case.above > ABOVE_ASKED]
    print(f"{len(small)} small cases, {len(missed)} more than {ABOVE_ASKED:.0%} above brute force")
    if missed:
        print(pairs.table([{**asdict(case), "above": f"{case.above:.2%}"} for case in missed]))
    profiles = []
    for path in sorted({path for start in arguments.only for path in arguments.folder.glob(f"{start}*.json")}):
        profiles += profile_cases(path)
    print(pairs.table([_row(case) for case in profiles]))
    asked = checks(small, profiles)
    print(pairs.checks_text(asked))
    if arguments.json:
        pairs.write(
            arguments.json,
            benchmark="partition_uneven",
            settings={"small": arguments.small, "only": arguments.only, "stages": STAGES, "microbatches": MICROBATCHES},
            machine=machine,
            figures=[asdict(case) for case in (*small, *profiles)],
            checks=asked,
        )


def _row(case: Profile) -> dict[str, str]:
    return {
        "profile": case.name,
        "objective": case.objective,
        "order": "free" if case.free_order else "fixed",
        "value ms": f"{case.value * 1e3:.4f}",
        "ignoring": f"{case.times_faster:.3f} x",
        "gap": f"{case.value / case.lower_bound - 1:.2%}" if case.lower_bound else "",
        "CPU s": f"{case.seconds:.1f}",
    }


if __name__ == "__main__":
    main()
