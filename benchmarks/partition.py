"""The cut against published optima and against peers, on every workload of ``benchmarks/data/workloads``.

    python -m benchmarks.partition [--only PREFIX ...] [--json FILE]

Every workload is cut as its references ask (stages, memory cap). ``ours`` is the largest load in ms, counted by the
checker and not by the search, ``bound`` what no cut can go below, ``s`` the CPU seconds of :func:`solve` on one core,
the reference what an earlier search found or proved. The peers cut the same graph in the same run, with colocation
groups merged, in topological order:

    torchgpipe   its block partition (Bárány et al.) of the nodes' times, from the installed package
    equal        as many nodes for every stage

and cost what the checker counts, relative to ours; neither looks at tensors or at memory ("over": its fullest stage is
above the cap). Exit code 1 when a number that is asked for is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from autosplit.partition.checker import Costs, check
from autosplit.partition.graph import base_graph
from autosplit.partition.problem import Problem
from autosplit.partition.solve import solve
from autosplit.partition.workload import load_workload
from benchmarks import pairs

FOLDER = Path(__file__).parent / "data" / "workloads"
PER_MILLION = 1e-6
ASKED_ABOVE, ASKED_GAP = 1.0, 0.03
"""Where no optimum is known: millionths above the reference, and the gap."""
WIDE = ("pd_nasnetalarge_bw1e10",)
ASKED_WIDE_ABOVE, ASKED_WIDE_GAP = 1e4, 0.25
"""Workloads with more ideals than are listed for a proof, and what is asked of these instead."""
ASKED_S = 5.0
ASKED_SUM_S = 60.0
ASKED_BYTES = 2**30


@dataclass(frozen=True)
class Peer:
    """A peer's cut: its largest load relative to ours, and whether it keeps the memory cap (None: there is none)."""

    ratio: float
    fits: bool | None


@dataclass(frozen=True)
class Row:
    """One workload at one of its references; loads in ms, gaps relative."""

    workload: str
    nodes: int
    stages: int
    memory_cap: int | None
    ours: float
    lower_bound: float
    status: str
    gap: float
    cpu_s: float
    wall_s: float
    reference: float
    reference_status: str
    reference_method: str
    peers: dict[str, Peer]

    @property
    def above_reference(self) -> float:
        """By how much, relatively, ours is above the reference."""
        return self.ours / self.reference - 1

    @property
    def name(self) -> str:
        """The workload and what is asked of it."""
        return f"{self.workload}, {self.stages} stages" + (", capped" if self.memory_cap is not None else "")


def equal_counts(nodes: int, stages: int) -> list[int]:
    """Return how many nodes each stage gets when all get as many."""
    return [nodes * (stage + 1) // stages - nodes * stage // stages for stage in range(stages)]


def block_partition(times: Sequence[float], stages: int) -> list[int]:
    """Return how many nodes each stage gets from torchgpipe's block partition."""
    peer = importlib.import_module("torchgpipe.balance.blockpartition")
    return [len(block) for block in peer.solve(list(times), stages)]


def peer_costs(problem: Problem, counts: Sequence[int]) -> Costs:
    """Return what stages of these many groups cost, taken in topological order."""
    bounds = [0, *accumulate(counts)]
    stage_of = [stage for stage, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)]
    return check(problem, [stage_of[group] for group in base_graph(problem).group_of])


def peers_of(problem: Problem, *, stages: int, bottleneck_s: float, cap: int | None) -> dict[str, Peer]:
    """Return the peers' cuts of a problem; torchgpipe's only where it is installed."""
    times = base_graph(problem).times_s
    stages = min(stages, len(times))
    counts = {"equal": equal_counts(len(times), stages)}
    if pairs.torchgpipe() is not None:
        counts["torchgpipe"] = block_partition(times, stages)
    found = {}
    for name, own in counts.items():
        costs = peer_costs(problem, own)
        fits = None if cap is None else max(costs.stage_bytes) <= cap
        found[name] = Peer(costs.bottleneck_s / bottleneck_s, fits)
    return found


def rows_of(path: Path) -> list[Row]:
    """Cut one workload as each of its references asks."""
    workload = load_workload(path)
    rows = []
    for reference in json.loads(path.read_text(encoding="utf-8"))["references"]:
        stages, given = reference["k"], reference["mem_cap"]
        cap = workload.capacity_bytes if given is None else int(given)
        problem = workload.problem(stages=stages, capacity_bytes=cap)
        wall, cpu = time.perf_counter(), time.process_time()
        found = solve(problem, stages=stages, empty=True)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        costs = check(problem, found.assignment)
        assert cap is None or max(costs.stage_bytes) <= cap, path.stem
        rows.append(
            Row(
                workload=path.stem,
                nodes=len(workload.works),
                stages=stages,
                memory_cap=cap,
                ours=costs.bottleneck_s * 1e3,
                lower_bound=found.lower_bound_s * 1e3,
                status=found.status,
                gap=found.gap,
                cpu_s=cpu,
                wall_s=wall,
                reference=reference["best"],
                reference_status=reference["status"],
                reference_method=reference["method"],
                peers=peers_of(problem, stages=stages, bottleneck_s=costs.bottleneck_s, cap=cap),
            )
        )
    return rows


def checks_of(rows: Sequence[Row], *, peak_bytes: int) -> list[pairs.Check]:
    """Return what is asked of the cuts, and of what finding them takes."""
    checks = []
    for row in rows:
        if row.reference_status == "optimal":
            apart = abs(row.above_reference) / PER_MILLION
            checks.append(pairs.at_most(f"{row.name}: millionths apart from the optimum", 1.0, apart))
            proved = row.status == "optimal"
            checks.append(pairs.Check(f"{row.name}: gap where the optimum is known", "optimal", row.gap, proved))
        else:
            above = row.above_reference / PER_MILLION
            wide = row.workload in WIDE
            most, gap = (ASKED_WIDE_ABOVE, ASKED_WIDE_GAP) if wide else (ASKED_ABOVE, ASKED_GAP)
            checks.append(pairs.at_most(f"{row.name}: millionths above the reference", most, above))
            checks.append(pairs.at_most(f"{row.name}: gap", gap, row.gap))
        checks.append(pairs.at_most(f"{row.name}: CPU seconds", ASKED_S, row.cpu_s))
    checks.append(pairs.at_most("all together: CPU seconds", ASKED_SUM_S, sum(row.cpu_s for row in rows)))
    checks.append(pairs.at_most("resident memory of the process, bytes", ASKED_BYTES, peak_bytes))
    return checks


def line(row: Row) -> dict[str, Any]:
    """Return a row as a line of the table."""
    peers = {
        name: f"{peer.ratio:.3f}{' over' if peer.fits is False else ''}" if (peer := row.peers.get(name)) else "-"
        for name in ("torchgpipe", "equal")
    }
    return {
        "workload": row.workload,
        "nodes": row.nodes,
        "k": row.stages,
        "cap GB": "-" if row.memory_cap is None else f"{row.memory_cap / 1e9:.4g}",
        "ours": f"{row.ours:.4f}",
        "bound": f"{row.lower_bound:.4f}",
        "status": row.status if row.status == "optimal" else f"gap {row.gap:.2%}",
        "s": f"{row.cpu_s:.2f}",
        "reference": f"{row.reference:.4f} {row.reference_status}",
        **peers,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="workloads whose names begin so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per workload and reference, then the checks; return the exit code."""
    arguments = parse(argv)
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    rows: list[Row] = []
    for path in sorted(FOLDER.glob("*.json")):
        if path.name.startswith(tuple(arguments.only)):
            rows += rows_of(path)
            print(f"{path.stem}: {sum(row.cpu_s for row in rows if row.workload == path.stem):.2f} s", file=sys.stderr)
    print(pairs.table([line(row) for row in rows]))
    checks = checks_of(rows, peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    print(f"{len(rows)} cuts in {sum(row.cpu_s for row in rows):.1f} s of CPU")
    print(pairs.checks_text(checks))
    if arguments.json:
        content = {
            "benchmark": "partition",
            "machine": machine,
            "settings": {"only": arguments.only},
            "checks": [asdict(check) for check in checks],
            "figures": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(check.ok for check in checks) else 1


def on_one_core() -> None:
    """Start again on one core, so that the libraries that were loaded for more do not wait for each other there."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(0, {max(cores)})
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.partition", *sys.argv[1:]])


if __name__ == "__main__":
    on_one_core()
    sys.exit(main())
