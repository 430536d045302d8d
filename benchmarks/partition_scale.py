"""What the best cut of a large graph takes: seconds and memory, by nodes and stages.

    python -m benchmarks.partition_scale [--only LAYERSxSTAGES ...] [--json FILE]

Graphs have Llama's shape (``benchmarks/llama_graph.py``): 2, 20, 100 and 400 layers are 116, 1,016, 5,016 and 20,016
nodes. Each case runs in a process of its own on one core. ``s`` are CPU seconds of :func:`solve`, without making the
graph; ``MiB`` is the most memory that the process had resident, torch and the graph included; loads are in ms, counted
by the checker, and no cut goes below ``bound``. Exit code 1 when a number that is asked for is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from autosplit.partition.solve import solve
from benchmarks import pairs
from benchmarks.llama_graph import MACHINE, llama_problem

LAYERS = (2, 20, 100, 400)
STAGES = (4, 8, 16, 32, 64)
ASKED_BYTES = 2**30
ASKED_GAP = 0.02
ASKED_S = {100: 15.0, 400: 60.0}
"""Most CPU seconds by layers."""


@dataclass(frozen=True)
class Row:
    """One graph cut into so many stages; loads in ms, the gap relative."""

    layers: int
    nodes: int
    stages: int
    value: float
    lower_bound: float
    gap: float
    status: str
    cpu_s: float
    wall_s: float
    graph_cpu_s: float
    peak_bytes: int

    @property
    def name(self) -> str:
        """Nodes and stages."""
        return f"{self.nodes:,} nodes, {self.stages} stages"


def measured(layers: int, stages: int) -> Row:
    """Cut one graph in this process."""
    started = time.process_time()
    problem = llama_problem(layers=layers)
    wall, cpu = time.perf_counter(), time.process_time()
    found = solve(problem, stages=stages)
    return Row(
        layers=layers,
        nodes=len(problem.works),
        stages=stages,
        value=found.value_s * 1e3,
        lower_bound=found.lower_bound_s * 1e3,
        gap=found.gap,
        status=found.status,
        cpu_s=time.process_time() - cpu,
        wall_s=time.perf_counter() - wall,
        graph_cpu_s=cpu - started,
        peak_bytes=_most_resident_bytes(),
    )


def _most_resident_bytes() -> int:
    """Return this program's peak; getrusage would count what its parent held when it was started."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def in_own_process(layers: int, stages: int) -> Row:
    """Cut one graph in a fresh process on one core."""
    core = max(os.sched_getaffinity(0))
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.partition_scale", "--case", f"{layers}x{stages}"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return Row(**json.loads(ran.stdout.splitlines()[-1]))


def checks_of(rows: Sequence[Row]) -> list[pairs.Check]:
    """Return what is asked of each case."""
    checks = []
    for row in rows:
        checks.append(pairs.at_most(f"{row.name}: gap", ASKED_GAP, row.gap))
        checks.append(pairs.at_most(f"{row.name}: resident bytes", ASKED_BYTES, row.peak_bytes))
        if row.layers in ASKED_S:
            checks.append(pairs.at_most(f"{row.name}: CPU seconds", ASKED_S[row.layers], row.cpu_s))
    return checks


def line(row: Row) -> dict[str, Any]:
    """Return a row as a line of the table."""
    return {
        "nodes": row.nodes,
        "stages": row.stages,
        "ours": f"{row.value:.4f}",
        "bound": f"{row.lower_bound:.4f}",
        "status": row.status if row.status == "optimal" else f"gap {row.gap:.2%}",
        "s": f"{row.cpu_s:.2f}",
        "MiB": f"{row.peak_bytes / 2**20:.0f}",
    }


def case(text: str) -> tuple[int, int]:
    """Return the layers and stages of ``100x64``."""
    layers, _, stages = text.partition("x")
    return int(layers), int(stages)


def write(path: Path, rows: Sequence[Row], *, machine: Mapping[str, Any]) -> None:
    """Write what was measured so far."""
    content = {
        "benchmark": "partition_scale",
        "machine": {**machine, "numpy": numpy.__version__},
        "graph": {"costs of": MACHINE, "shape": "Llama", "scatter": 0.1},
        "checks": [asdict(check) for check in checks_of(rows)],
        "figures": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per case, then the checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [(layers, stages) for layers in LAYERS for stages in STAGES]
    parser.add_argument("--only", nargs="+", type=case, default=every, metavar="LAYERSxSTAGES")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--case", type=case, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case is not None:
        print(json.dumps(asdict(measured(*arguments.case))))
        return 0
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    rows: list[Row] = []
    for layers, stages in arguments.only:
        rows.append(in_own_process(layers, stages))
        print(f"{rows[-1].name}: {rows[-1].cpu_s:.2f} s", file=sys.stderr)
        if arguments.json:
            write(arguments.json, rows, machine=machine)
    checks = checks_of(rows)
    print(pairs.table([line(row) for row in rows]))
    print(pairs.checks_text(checks))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
