"""``autosplit solve``: the best cut of a workload file into stages, with its proof."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from autosplit.checks import choose
from autosplit.cli.common import DONE, Debug, beside_stdout, command, on_terminal
from autosplit.errors import InfeasibleError, InputError
from autosplit.units import parse_bytes

if TYPE_CHECKING:
    from autosplit.partition.solve import Objective

OBJECTIVES = ("bottleneck", "step_time")
SCHEDULES = ("gpipe", "1f1b")
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
        str, typer.Option(help="What is made least: bottleneck, or step_time (simulated).")
    ] = "bottleneck",
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step; counts for step_time.")] = 8,
    schedule: Annotated[str, typer.Option(help=f"{' or '.join(SCHEDULES)}; counts for step_time.")] = "1f1b",
    memory_cap: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Of a stage, such as 16GiB (default: the file's mem_cap).")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds after which the best so far is the answer.")
    ] = None,
    as_json: Annotated[
        bool | None, typer.Option("--json/--table", help="Print JSON or a table (default: a table on a terminal).")
    ] = None,
    debug: Debug = False,
) -> int:
    """Cut a workload file into stages: the best partition, and the proof or how far from the best it may be."""
    from autosplit.cli.solve_answer import answer_json, answer_table, refusal_json
    from autosplit.partition.infeasible import require_separable
    from autosplit.partition.solve import solve
    from autosplit.partition.workload import load_workload

    choose("--objective", objective, OBJECTIVES)
    choose("--schedule", schedule, SCHEDULES)
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"--time-limit {time_limit} is no number of seconds above 0")
    found = load_workload(workload)
    # More stages than nodes would all stay empty.
    used = min(stages, len(found.works))
    cap_bytes = None if memory_cap is None else parse_bytes(memory_cap)
    problem = found.problem(
        stages=used,
        capacity_bytes=cap_bytes,
        microbatches=microbatches,
        schedule=schedule,
    )
    prints_json = as_json if as_json is not None else not on_terminal()
    started = time.perf_counter()
    try:
        require_separable(problem, stages=stages)
        with beside_stdout():
            partition = solve(
                problem, stages=used, objective=cast("Objective", objective), empty=True, time_limit_s=time_limit
            )
    except InfeasibleError as error:
        if prints_json:
            typer.echo(json.dumps(refusal_json(error, objective=objective, seconds=time.perf_counter() - started)))
        raise
    seconds = time.perf_counter() - started
    if prints_json:
        typer.echo(json.dumps(answer_json(partition, stages=used, seconds=seconds)))
    else:
        typer.echo(answer_table(found, partition, stages=stages, seconds=seconds))
    return DONE
