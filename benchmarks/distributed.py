"""A training step over several processes: ours beside torch.distributed.pipelining written by hand, over gloo.

    python -m benchmarks.distributed [--ranks 2] [--models mlp ...] [--only CONTENDER ...] [--rounds 9] [--json FILE]

It starts itself by torchrun: a process per rank with one intra-op thread, all contenders in the same processes.

    torch          `PipelineStage` at the best of all cuts between a model's parts, each of which is timed
    ours           ``autosplit(model, devices="torchrun", sample=x)`` under the same schedule, with the cut of its plan
    ours, auto     the same with the schedule that it chooses

A step is forward, loss and backward, from gradients that are None, and takes as long as its slowest rank. Contenders
take turns, and the order turns by one from round to round; all take the same optimizer step after it is read, and have
to have the same loss in each round.

    speed          seconds of torch over the contender's, of the same round: median [quartiles]
    bound          the schedule simulated from its cells, measured alone on all ranks at once; messages take no time
    per message    empty cells that send as many bytes: a step beyond its bound, over the messages of one boundary
    own share      empty cells: CPU seconds of a rank, all threads, beyond its cells', over the seconds of the real step
    error          predicted (`pipe.plan.step_s`) over measured seconds, less one
    scale          simulated: more ranks, 4 microbatches each, the mean of the measured cells on every rank with its own
                   share of every action, messages as measured; how much of a step a rank computes
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import TransferTime, simulate
from benchmarks import pairs
from benchmarks.distributed_step import EMPTY, SCHEDULES, Cells, Ours, Torch, best_cut, cells_of, empty, read
from benchmarks.peers_models import CHUNKS, Subject, subjects

NAMES = TORCH, OURS, AUTO = ("torch", "ours", "ours, auto")
MODELS = ("mlp", "conv", "transformer", "gpt2", EMPTY)
TINY_BYTES = 1024
EMPTY_CALLS = 20
SIMULATED_RANKS = (2, 4, 8, 16, 32, 64)
SIMULATED_CHUNKS = 4
"""Microbatches per rank."""

SAME_ASKED, BEST_ASKED, SHARE_ASKED, ERROR_ASKED, LEAST_CELL_S = 1.0, 1.03, 0.02, 0.10, 0.005


def bound_s(
    schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], *, chunks: int, message_s: float = 0.0
) -> float:
    """Return the simulated length of a step, a stage per rank; a backward in two parts is halved."""
    half = [seconds / 2 for seconds in backward_s]
    return simulate(
        build(schedule, stages=len(forward_s), microbatches=chunks),
        forward_s=forward_s,
        backward_s=backward_s,
        input_gradient_s=half,
        weight_gradient_s=half,
        transfers=[TransferTime(stage, stage + 1, message_s, message_s) for stage in range(len(forward_s) - 1)],
    ).step_s


def measure(model: str, names: Sequence[str], *, schedule: str, rounds: int) -> list[dict[str, Any]]:
    """Read all contenders on one model and on empty cells that send as much; return a figure for each."""
    subject = empty(TINY_BYTES) if model == EMPTY else subjects()[model]
    cut, cuts_s = best_cut(subject, schedule, rounds=max(1, rounds // 3))
    contenders, readings, cells = measured(subject, names, cut, schedule=schedule, rounds=rounds)
    empties, empty_cells = readings, cells
    if model != EMPTY:
        stages = tuple(range(len(cut)))
        _, empties, empty_cells = measured(empty(cells.message_bytes), names, stages, schedule=schedule, rounds=rounds)
    figures = []
    for name in names:
        wall = pairs.Spread.of([reading.wall_s for reading in readings[name]])
        message_s, own_s = overhead(empties[name], empty_cells, schedule)
        plan = None if name == TORCH else contenders[name].pipe.plan
        figures.append(
            {
                "model": model,
                "contender": name,
                "wall_s": wall,
                "speed": speed(readings, name) if TORCH in readings else None,
                "bound_s": bound_s(schedule, cells.forward_s, cells.backward_s, chunks=CHUNKS),
                "message_bytes": cells.message_bytes,
                "message_s": message_s,
                "own_s": own_s,
                "own_share": own_s / wall.median,
                "predicted_s": plan and plan.step_s,
                "error": plan and plan.step_s / wall.median - 1,
                "cells_s": {"forward": cells.forward_s, "backward": cells.backward_s},
                "schedule": plan.schedule if plan else schedule,
                "stages": [stage.modules[0] for stage in plan.stages] if plan else [f"parts.{part}" for part in cut],
                "cuts_s": {} if plan else cuts_s,
                "simulated": [] if model == EMPTY else scale(cells, message_s=message_s, own_s=own_s),
            }
        )
    return figures


def measured(
    subject: Subject, names: Sequence[str], cut: Sequence[int], *, schedule: str, rounds: int
) -> tuple[dict[str, Any], dict[str, list[pairs.Reading]], Cells]:
    """Return the contenders on one model, their readings, and the cells of the cut that is torch's."""
    contenders: dict[str, Any] = {
        name: Torch(made, cut, schedule) if name == TORCH else Ours(made, "auto" if name == AUTO else schedule)
        for name in names
        for made in [subject.make()]
    }
    readings = read(contenders, rounds=rounds, calls=EMPTY_CALLS if subject.name == EMPTY else 1)
    return contenders, readings, cells_of(subject.make(), cut, repeats=rounds)


def speed(readings: Mapping[str, Sequence[pairs.Reading]], name: str) -> pairs.Spread:
    """Return how many times as fast as torch a contender is."""
    both = zip(readings[TORCH], readings[name], strict=True)
    return pairs.Spread.of([torchs.wall_s / own.wall_s for torchs, own in both])


def overhead(readings: Sequence[pairs.Reading], cells: Cells, schedule: str) -> tuple[float, float]:
    """Return seconds per message of a boundary, and a rank's CPU seconds of a step, both beyond the empty cells'."""
    bound = bound_s(schedule, cells.forward_s, cells.backward_s, chunks=CHUNKS)
    wall = statistics.median(reading.wall_s for reading in readings)
    process = statistics.median(reading.process_s for reading in readings)
    return (wall - bound) / (2 * CHUNKS), process - max(cells.process_s)


def scale(cells: Cells, *, message_s: float, own_s: float) -> list[dict[str, Any]]:
    """Return simulated steps of more ranks under 1F1B; ``computes`` is the share of a step in a rank's cells."""
    forward, backward = statistics.fmean(cells.forward_s), statistics.fmean(cells.backward_s)
    each = own_s / (2 * CHUNKS)
    found = []
    for ranks in SIMULATED_RANKS:
        chunks = SIMULATED_CHUNKS * ranks
        taken = ([forward + each] * ranks, [backward + each] * ranks)
        step_s = bound_s("1f1b", *taken, chunks=chunks, message_s=max(0.0, message_s - each))
        found.append({"ranks": ranks, "step_s": step_s, "computes": chunks * (forward + backward) / step_s})
    return found


def checks_of(figures: Sequence[Mapping[str, Any]]) -> list[pairs.Check]:
    """Return what is asked of ours."""
    checks = []
    for figure in figures:
        model, name = figure["model"], figure["contender"]
        if name == TORCH:
            continue
        if figure["speed"] is not None:
            asked = BEST_ASKED if name == AUTO and model != EMPTY else SAME_ASKED
            checks.append(pairs.at_least(f"{model}: {name}, over torch", asked, figure["speed"].median))
        if model != EMPTY:
            checks.append(pairs.at_most(f"{model}: {name}, own share of a step", SHARE_ASKED, figure["own_share"]))
        if min(figure["cells_s"]["forward"]) >= LEAST_CELL_S:
            checks.append(pairs.at_most(f"{model}: {name}, |error|", ERROR_ASKED, abs(figure["error"])))
    return checks


def row(figure: Mapping[str, Any]) -> dict[str, str]:
    """Return a figure as a line of the table."""
    most = {entry["ranks"]: f"{entry['computes']:.1%}" for entry in figure["simulated"]}
    return {
        "model": figure["model"],
        "contender": figure["contender"],
        "measured ms [quartiles]": figure["wall_s"].scaled(1e3).text(),
        "speed": figure["speed"].text(3) if figure["speed"] else "-",
        "bound ms": f"{figure['bound_s'] * 1e3:.1f}",
        "per message": f"{figure['message_s'] * 1e6:.0f} µs of {figure['message_bytes'] / 1024:.0f} KiB",
        "own share": f"{figure['own_share']:.1%}",
        "error": "-" if figure["error"] is None else f"{figure['error']:+.1%}",
        f"computes at {SIMULATED_RANKS[-1]} (simulated)": most.get(SIMULATED_RANKS[-1], "-"),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*subjects(), EMPTY], default=MODELS)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="CONTENDER", help=", ".join(NAMES))
    parser.add_argument("--schedule", choices=SCHEDULES, default=SCHEDULES[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes; as many cores should be idle")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start a process per rank, each of which calls this again, and print and write what rank 0 found."""
    options = parse(argv)
    if not dist.is_torchelastic_launched():
        start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), "--module"]
        command = [sys.executable, "-m", *start, "benchmarks.distributed", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
    torch.set_num_threads(1)
    machine = pairs.facts()
    dist.init_process_group("gloo")
    given = {"schedule": options.schedule, "rounds": options.rounds}
    figures: list[dict[str, Any]] = []
    for model in options.models:
        figures += measure(model, options.only, **given)
    if dist.get_rank() == 0:
        report(options, machine, figures)
    dist.destroy_process_group()
    return 0


def report(options: argparse.Namespace, machine: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> None:
    """Print the figures and checks, and write them where ``--json`` says."""
    checks = checks_of(figures)
    print(f"{pairs.facts_text(machine)}\n{options.ranks} ranks, {options.schedule}, {CHUNKS} microbatches, float32")
    print(pairs.table([row(figure) for figure in figures]))
    settings = {key: getattr(options, key) for key in ("ranks", "schedule", "rounds")} | {"chunks": CHUNKS}
    settings["models"] = {model: subjects()[model].shape for model in options.models if model != EMPTY}
    pairs.conclude(
        options.json, benchmark="distributed", settings=settings, machine=machine, figures=figures, checks=checks
    )


if __name__ == "__main__":
    sys.exit(main())
