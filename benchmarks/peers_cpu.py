"""A training step on two lanes of the CPU: ours, torchgpipe, plain, and the bound.

    python -m benchmarks.peers_cpu [--json FILE] [--rounds 7] [--models mlp ...] [--only CONTENDER ...]

Every contender has the same model, weights, batch of 8 microbatches and, where it cuts, the same cut; its gradients are
held against the plain model's before anything is read. A step is forward, loss and backward, without an optimizer,
from gradients that are None. Contenders take turns, and the order turns by one from round to round.

    ours ...             `train_step` on two lanes, a thread each with one intra-op thread
    ours default         the same with the cut and the schedule that `autosplit()` chooses itself
    torchgpipe, 1 (2)    torchgpipe on ["cpu", "cpu"], with one (two) intra-op threads; no recomputation
    plain, 1 (2)         the model as it is, with one (two) intra-op threads
    microbatched         a plain loop over the microbatches, a backward for each, one thread

    speed       seconds of plain on one thread over the contender's, of the same round: median [quartiles]
    CPU         seconds of CPU, over all threads
    bound       the schedule simulated from its cells, each measured alone on one thread in the same round (forward,
                loss, backward or its two parts); nothing else takes time, and nothing is shared
    share       the bound over the contender's seconds
    split       the input and the weight part of a backward over the backward in one piece

:mod:`benchmarks.distributed` compares with torch.distributed.pipelining.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import pairs, peers_local
from benchmarks.peers_local import Alone, Cells, Local
from benchmarks.peers_models import CHUNKS, MODELS, Made, Subject, subjects

OURS = {"ours gpipe": "gpipe", "ours 1f1b": "1f1b", "ours zb_h1": "zb_h1"}
DEFAULT = "ours default"
GPIPE = {"torchgpipe, 1": 1, "torchgpipe, 2": 2}
PLAIN = {"plain, 1": 1, "plain, 2": 2}
LOOP = "microbatched"
BASE = "plain, 1"
NAMES = (DEFAULT, *OURS, *GPIPE, *PLAIN, LOOP)
TOLERANCE = 1e-4
"""By which share of the largest entry gradients in float32 may differ."""

GPIPE_ASKED, BEST_ASKED, BOUND_ASKED = 1.05, 1.03, 0.93
GPIPE_ASKED_MORE = {"transformer": 1.15, "mlp": 1.15}


Rounds = Mapping[str, Sequence[pairs.Reading]]


def contender(name: str, made: Made) -> Local:
    """Return what runs the steps of ``name``."""
    if name == DEFAULT:
        return peers_local.default(made)
    if name in OURS:
        return peers_local.ours(made, OURS[name])
    if name in GPIPE:
        return peers_local.torchgpipe(made, threads=GPIPE[name])
    if name in PLAIN:
        return peers_local.plain(made, threads=PLAIN[name])
    return peers_local.microbatched(made)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between two lists of gradients, each over its gradient's largest entry."""
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} gradients, {len(expected)} expected")
    return max(float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True))


def read(subject: Subject, names: Sequence[str], *, rounds: int) -> tuple[Rounds, list[Cells]]:
    """Read all contenders on one model in rounds, after each has found the plain model's gradients.

    Raises ValueError when one finds others.
    """
    gc.collect()
    contenders: dict[str, Local] = {}
    try:
        reference = peers_local.plain(subject.make(), threads=1)
        reference.read()
        expected = reference.gradients()
        for name in names:
            contenders[name] = contender(name, subject.make())
            contenders[name].read()
            off = difference(contenders[name].gradients(), expected)
            if not off <= TOLERANCE:
                raise ValueError(f"{subject.name}: the gradients of {name!r} are off by {off:.2g}")
        return _rounds(contenders, Alone(subject.make()), rounds)
    finally:
        for own in contenders.values():
            own.close()


def _rounds(contenders: Mapping[str, Local], alone: Alone, rounds: int) -> tuple[Rounds, list[Cells]]:
    found: dict[str, list[pairs.Reading]] = {name: [] for name in contenders}
    cells = []
    alone.measure()
    for turn in range(rounds):
        for name in pairs.rotated([*contenders, ""], turn):
            if name:
                found[name].append(contenders[name].read())
            else:
                cells.append(alone.measure())
    return found, cells


def ratios(rounds: Rounds, slower: str, faster: str) -> pairs.Spread:
    """Return how many times as fast one contender is as another, from readings of the same round."""
    both = zip(rounds[slower], rounds[faster], strict=True)
    return pairs.Spread.of([one.wall_s / other.wall_s for one, other in both])


def shares(rounds: Rounds, cells: Sequence[Cells], name: str) -> pairs.Spread:
    """Return the share of the bound that a contender with a schedule reaches, from cells of the same round."""
    schedule = OURS[name]
    both = zip(rounds[name], cells, strict=True)
    return pairs.Spread.of([own.step_s(schedule) / reading.wall_s for reading, own in both])


def figures_of(subject: Subject, rounds: Rounds, cells: Sequence[Cells]) -> list[dict[str, Any]]:
    """Return a figure for every contender."""
    return [
        {
            "model": subject.name,
            "contender": name,
            "rounds": len(readings),
            "wall_s": pairs.Spread.of([reading.wall_s for reading in readings]),
            "cpu_s": pairs.Spread.of([reading.process_s for reading in readings]),
            "speed": ratios(rounds, BASE, name) if BASE in rounds else None,
            "bound_s": _bound(cells, name),
            "share": shares(rounds, cells, name) if name in OURS else None,
        }
        for name, readings in rounds.items()
    ]


def _bound(cells: Sequence[Cells], name: str) -> pairs.Spread | None:
    schedule = OURS.get(name)
    return None if schedule is None else pairs.Spread.of([own.step_s(schedule) for own in cells])


def checks_of(model: str, rounds: Rounds, cells: Sequence[Cells]) -> list[pairs.Check]:
    """Return what is asked on one model of the contenders; ours is held against the fastest way of a peer."""
    checks = []
    ours = [name for name in OURS if name in rounds]
    single = [name for name in GPIPE if name in rounds]
    if "ours 1f1b" in rounds and single:
        speed = min(ratios(rounds, name, "ours 1f1b").median for name in single)
        asked = GPIPE_ASKED_MORE.get(model, GPIPE_ASKED)
        checks.append(pairs.at_least(f"{model}: 1f1b over torchgpipe", asked, speed))
    if DEFAULT in rounds and single:
        speed = min(ratios(rounds, peer, DEFAULT).median for peer in single)
        checks.append(pairs.at_least(f"{model}: the default over the fastest peer", BEST_ASKED, speed))
    checks += [
        pairs.at_least(f"{model}: {name}, share of the bound", BOUND_ASKED, shares(rounds, cells, name).median)
        for name in ours
    ]
    return checks


def row(figure: Mapping[str, Any]) -> dict[str, str]:
    """Return a figure as a line of the table."""
    share, bound = figure["share"], figure["bound_s"]
    return {
        "model": figure["model"],
        "contender": figure["contender"],
        "measured ms [quartiles]": figure["wall_s"].scaled(1e3).text(0),
        "CPU ms": f"{figure['cpu_s'].median * 1e3:.0f}",
        "speed": figure["speed"].text(2) if figure["speed"] else "-",
        "bound ms": f"{bound.median * 1e3:.0f}" if bound else "-",
        "share": f"{share.median:.1%} [{share.low:.1%}, {share.high:.1%}]" if share else "-",
    }


def cells_of(cells: Sequence[Cells]) -> dict[str, Any]:
    """Return the medians of a model's cells by kind and stage, in seconds, and what the split costs."""
    kinds = {kind: own for one in cells for kind, own in (one.split.seconds | one.whole.seconds).items()}
    seconds = {
        kind: [
            statistics.median((one.split.seconds | one.whole.seconds)[kind][stage] for one in cells)
            for stage in range(len(own))
        ]
        for kind, own in kinds.items()
    }
    return {"seconds": seconds, "split": statistics.median(one.split_cost for one in cells)}


def cells_text(model: str, cells: Mapping[str, Any]) -> str:
    """Return a model's cells as a line."""
    parts = (f"{kind} {' + '.join(f'{s * 1e3:.1f}' for s in own)}" for kind, own in cells["seconds"].items())
    return f"{model}: cells of the two stages alone, ms: {', '.join(parts)}; split {cells['split']:.2f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(subjects()), default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="CONTENDER", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table for every model, then the checks."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    machine = pairs.facts()
    print(f"{pairs.facts_text(machine)}\n2 lanes, {CHUNKS} microbatches, float32")
    names = list(arguments.only)
    if pairs.torchgpipe() is None and any(name in GPIPE for name in names):
        print("torchgpipe is not installed; going on without it")
        names = [name for name in names if name not in GPIPE]
    figures: list[dict[str, Any]] = []
    checks: list[pairs.Check] = []
    alone: dict[str, Any] = {}
    for model in arguments.models:
        subject = subjects()[model]
        rounds, cells = read(subject, names, rounds=arguments.rounds)
        own = figures_of(subject, rounds, cells)
        alone[model] = cells_of(cells)
        print(f"\n{model}: {subject.shape}\n{cells_text(model, alone[model])}\n{pairs.table([row(f) for f in own])}")
        figures += own
        checks += checks_of(model, rounds, cells)
    shapes = {model: subjects()[model].shape for model in arguments.models}
    settings = {"rounds": arguments.rounds, "chunks": CHUNKS, "only": names, "models": shapes, "cells": alone}
    print()
    pairs.conclude(
        arguments.json, benchmark="peers_cpu", settings=settings, machine=machine, figures=figures, checks=checks
    )


if __name__ == "__main__":
    main()
