"""``autosplit solve``: the best cut of a workload file into stages, with its proof."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autosplit.cli.common import DONE, beside_stdout, command, on_terminal
from autosplit.errors import InfeasibleError, InputError
from autosplit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from autosplit.partition.solve import Partition
    from autosplit.partition.workload import Workload

_MS_PER_S = 1e3
_NAME_WIDTH = 32

EXAMPLES = """Examples:

\b
  autosplit solve gnmt.json --stages 8
  autosplit solve gnmt.json --stages 8 --memory-cap 16GiB --json | jq .assignment
  autosplit solve gnmt.json --stages 8 --objective step_time --microbatches 32 --schedule gpipe
  autosplit solve huge.json --stages 64 --time-limit 10

The file has the format autosplit-workload/1: nodes with times in ms and bytes, edges that carry tensors, colors that
keep nodes together. A bottleneck is the largest load of a stage, the time of its nodes and of the tensors that cross
its boundaries. The answer is "optimal", or "bounded" and then nothing is below lower_bound. Stages may stay empty.

The JSON has the keys assignment (the stage of each node), bottleneck, lower_bound (of the objective), status, seconds
(what solving took), and beside them unit, objective, gap, loads and bytes of the stages (at most as many as nodes), and
step_time where that is the objective. Times other than seconds are in ms, as in the file. Without --json and --table a
terminal gets a table, everything else JSON.

Exit codes: 0 done; 1 no partition fits; 2 bad usage or input.
"""


@command
def solve_command(
    workload: Annotated[
        Path, typer.Argument(metavar="WORKLOAD.json", help="A file in the format autosplit-workload/1.")
    ],
    stages: Annotated[int, typer.Option(min=1, help="Number of stages, one per device.")],
    objective: Annotated[
        Literal["bottleneck", "step_time"], typer.Option(help="What is made least; step_time is simulated.")
    ] = "bottleneck",
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step; counts for step_time.")] = 8,
    schedule: Annotated[Literal["gpipe", "1f1b"], typer.Option(help="Counts for step_time.")] = "1f1b",
    memory_cap: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Of a stage, such as 16GiB (default: the file's mem_cap).")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds after which the best so far is the answer.")
    ] = None,
    as_json: Annotated[
        bool | None, typer.Option("--json/--table", help="Print JSON or a table (default: a table on a terminal).")
    ] = None,
) -> int:
    """Cut a workload file into stages: the best partition, and the proof or how far from the best it may be."""
    from autosplit.partition.infeasible import require_separable
    from autosplit.partition.solve import solve
    from autosplit.partition.workload import load_workload

    if time_limit is not None and not time_limit > 0:
        raise InputError(f"--time-limit {time_limit} is no number of seconds above 0")
    loaded = load_workload(workload)
    # More stages than nodes would all stay empty.
    used = min(stages, len(loaded.works))
    cap_bytes = None if memory_cap is None else parse_bytes(memory_cap)
    problem = loaded.problem(stages=used, capacity_bytes=cap_bytes, microbatches=microbatches, schedule=schedule)
    prints_json = as_json if as_json is not None else not on_terminal()
    started = time.perf_counter()
    try:
        require_separable(problem, stages=stages)
        with beside_stdout():
            partition = solve(problem, stages=used, objective=objective, empty=True, time_limit_s=time_limit)
    except InfeasibleError as error:
        if prints_json:
            nothing = dict.fromkeys(("assignment", "bottleneck", "lower_bound"))
            said = {"status": "infeasible", "objective": objective, "smallest_memory_cap": error.smallest_bytes}
            typer.echo(json.dumps(nothing | said))
        raise
    seconds = time.perf_counter() - started
    if prints_json:
        typer.echo(json.dumps(_answer_json(partition, stages=used, seconds=seconds)))
    else:
        typer.echo(_answer_table(loaded, partition, stages=stages, seconds=seconds))
    return DONE


def _ms(seconds: float) -> float:
    """Return the file's unit, without the digits that the way to seconds and back has left."""
    return float(f"{seconds * _MS_PER_S:.12g}")


def _answer_json(partition: Partition, *, stages: int, seconds: float) -> dict[str, Any]:
    """Return what a script reads; times other than seconds are in ms, as in the file."""
    empty = stages - partition.stages
    value, bound = _ms(partition.value_s), _ms(partition.lower_bound_s)
    answer = {
        "assignment": partition.assignment,
        "bottleneck": _ms(partition.costs.bottleneck_s),
        "lower_bound": bound,
        "status": partition.status,
        "seconds": round(seconds, 6),
        "unit": "ms",
        "objective": partition.objective,
        "gap": value / bound - 1 if bound else None if value else 0.0,
        "loads": [*map(_ms, partition.costs.loads_s), *[0.0] * empty],
        "bytes": [*partition.costs.stage_bytes, *[0] * empty],
    }
    return answer | ({"step_time": value} if partition.objective == "step_time" else {})


def _answer_table(workload: Workload, partition: Partition, *, stages: int, seconds: float) -> str:
    """Return the stages and the proof as a table."""
    from tabulate import tabulate

    members: list[list[int]] = [[] for _ in range(partition.stages)]
    for node, stage in enumerate(partition.assignment):
        members[stage].append(node)
    has_bytes = any(partition.costs.stage_bytes)
    header = ["stage", "nodes", "first", "last", "load"] + ["memory"] * has_bytes
    rows = []
    for stage, ids in enumerate(members):
        ends = [f"{node} {_short(workload.works[node].name)}" for node in (ids[0], ids[-1])] if ids else ["-", "-"]
        load = f"{_ms(partition.costs.loads_s[stage]):.6g} ms"
        rows.append([stage, len(ids), *ends, load] + [format_bytes(partition.costs.stage_bytes[stage])] * has_bytes)
    align = ("right", "right", "left", "left", "right", "right")[: len(header)]
    table = tabulate(rows, headers=header, tablefmt="simple", disable_numparse=True, colalign=align)
    unused = f"; {stages - partition.stages} more stay empty" if stages > partition.stages else ""
    title = f"{_short(workload.name)}: {len(workload.works)} nodes, {partition.stages} stages{unused}"
    return f"{title}\n\n{table}\n\n{_verdict(partition, seconds=seconds)}"


def _verdict(partition: Partition, *, seconds: float) -> str:
    from tabulate import tabulate

    proof = "optimal: no partition has less"
    if partition.status != "optimal":
        proof = f"none is below {_ms(partition.lower_bound_s):.7g} ms: at most {partition.gap:.2%} above the best"
    rows = [["bottleneck", f"{_ms(partition.costs.bottleneck_s):.7g} ms"], ["solved in", f"{seconds:.2f} s"]]
    if partition.objective == "step_time":
        rows.insert(0, ["step time", f"{_ms(partition.value_s):.7g} ms"])
    rows[0][1] += f", {proof}"
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _short(name: str) -> str:
    """Return a short printable form of a name."""
    text = repr(name)[1:-1]
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."
