"""Stages with replicas against PipeDream's planner, on the profiles that its repository has.

    python -m benchmarks.pipedream [--only PREFIX ...] [--json FILE]

Each row of ``benchmarks/data/pipedream/planner.json`` is a number of devices, a bandwidth, and the stages that its
planner printed, or that its repository or paper ran. Ours are of the nodes in model order; theirs may take nodes in
any. Both are costed twice, in ms per minibatch: as the planner's code counts (gradients are exchanged behind the work,
there and back; a stage of several replicas has as many links), and as the paper writes (`pipedream`). What
the planner printed is what its stages are found to cost, or the row fails. Exit code 1 when ours is slower anywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.replication import StageSeconds, between, replicate, stages_only
from benchmarks import pairs

FOLDER = Path(__file__).parent / "data" / "pipedream"
ROUNDING = 1e-9
_NODE = re.compile(r"node(\d+) -- (\w+).* -- forward_compute_time=(\S+), backward_compute_time=(\S+), (.*)")
_FIGURES = re.compile(r"activation_size=(.*), parameter_size=(\S+)")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """What one minibatch costs a layer: forward and backward, what goes on from it, what its replicas exchange."""

    seconds: float
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0


def pipedream(layers: Sequence[Layer], *, devices: int, bandwidth_bytes_per_s: float) -> StageSeconds:
    """Return what stages of a line take by PipeDream's formula, the transfer behind them included.

    Replicas exchange ``2 (m - 1) / m`` times the bytes of their gradients, each, beside their work. What crosses a cut
    goes there, and its gradient back.
    """
    works_s, parameters, sent = (
        np.array([0.0, *(getattr(layer, name) for layer in layers)])
        for name in ("seconds", "parameter_bytes", "output_bytes")
    )
    sent[-1] = 0.0  # what the last layer makes goes nowhere
    sent_s = 2 * sent / bandwidth_bytes_per_s
    work_s, gradients_s = between(works_s), between(parameters / bandwidth_bytes_per_s)

    @cache
    def own_s(replicas: int) -> Floats:
        own: Floats = np.maximum(work_s, 2 * (replicas - 1) / replicas * gradients_s) / replicas
        return stages_only(np.maximum(own, sent_s))

    return lambda replicas, ahead: own_s(replicas)


@dataclass(frozen=True)
class Node:
    """A node of a profile: both passes, and bytes."""

    seconds: float
    output_bytes: float
    parameter_bytes: float


class Profile:
    """A profile of PipeDream's, without its inputs and without results that nobody takes, as its planner has it."""

    def __init__(self, name: str) -> None:
        text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
        edges = [(int(a), int(b)) for a, b in re.findall(r"^\tnode(\d+) -- node(\d+)$", text, re.MULTILINE)]
        producers = {a for a, _ in edges}
        self.nodes: dict[int, Node] = {}
        for number, kind, forward, backward, figures in _NODE.findall(text):
            sizes, parameters = _FIGURES.search(figures).groups()  # type: ignore[union-attr]
            unused = kind.startswith("__getitem__") and int(number) not in producers
            if not kind.startswith("Input") and not unused:
                output_bytes = sum(map(float, sizes.strip("[]").split("; ")))
                self.nodes[int(number)] = Node(
                    (float(forward) + float(backward)) / 1e3, output_bytes, float(parameters)
                )
        self.nodes = dict(sorted(self.nodes.items()))
        self.edges = [(a, b) for a, b in edges if a in self.nodes and b in self.nodes]

    def sent_bytes(self, done: set[int]) -> float:
        """Return what goes on from the nodes that a cut has before it."""
        return sum(self.nodes[a].output_bytes for a in {a for a, b in self.edges if a in done and b not in done})

    def layers(self, stages: Sequence[Sequence[int]]) -> list[Layer]:
        """Return stages, or nodes one by one, as layers of a line."""
        made, done = [], set[int]()
        for stage in stages:
            done.update(stage)
            own = [self.nodes[number] for number in stage]
            seconds, parameters = sum(node.seconds for node in own), sum(node.parameter_bytes for node in own)
            made.append(Layer(seconds, self.sent_bytes(done), parameters))
        return made


def as_coded(layers: Sequence[Layer], *, devices: int, bandwidth_bytes_per_s: float) -> StageSeconds:
    """Return what stages take by ``optimizer/optimizer_graph_hierarchical.py``, of one level.

    The first stage's output counts with the stage behind it only.
    """
    works_s, parameters, sent = (
        np.array([0.0, *(getattr(layer, name) for layer in layers)])
        for name in ("seconds", "parameter_bytes", "output_bytes")
    )
    sent[-1] = 0.0
    work_s, gradients_s = between(works_s), between(parameters / bandwidth_bytes_per_s)
    border_s = 2 * np.maximum(sent[:, None], sent[None, :]) / bandwidth_bytes_per_s
    border_s[0] = 0.0

    def stage_s(replicas: int, ahead: int) -> Floats:
        own = np.maximum(work_s + 4 * (replicas - 1) / replicas * gradients_s, border_s)
        return stages_only(own / replicas)

    return stage_s


OBJECTIVES: dict[str, Callable[..., StageSeconds]] = {"code": as_coded, "paper": pipedream}


@dataclass(frozen=True)
class Row:
    """One configuration: replicas by stage, and by objective what the slowest stage takes per minibatch.

    ``ours`` are by objective too. ``printed_s`` is what theirs printed, None where its stages are known otherwise.
    """

    profile: str
    devices: int
    bandwidth_bytes_per_s: float
    source: str
    theirs: tuple[int, ...]
    ours: dict[str, tuple[int, ...]]
    printed_s: float | None
    theirs_s: dict[str, float]
    ours_s: dict[str, float]

    @property
    def name(self) -> str:
        """The configuration in words."""
        by = "planner" if self.source == "planner" else "published"
        return f"{self.profile}, {self.devices} devices at {self.bandwidth_bytes_per_s / 1e9:g} GB/s, {by}"


def costed(stage_s: StageSeconds, bounds: Sequence[int], replicas: Sequence[int]) -> float:
    """Return what the slowest of some stages takes."""
    ahead = [sum(replicas[stage:]) for stage in range(len(replicas))]
    stages = zip(pairwise(bounds), replicas, ahead, strict=True)
    return max(float(stage_s(m, n)[first, stop]) for (first, stop), m, n in stages)


def numbers(text: str) -> list[int]:
    """Return the numbers of ranges such as "2-5,7"."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)]


def row_of(row: dict[str, Any]) -> Row:
    """Plan one configuration, and cost both plans."""
    profile, m = Profile(row["profile"]), tuple(row["replicas"])
    about = {"devices": row["devices"], "bandwidth_bytes_per_s": row["bandwidth_bytes_per_s"]}
    line = profile.layers([[number] for number in profile.nodes])
    stages = [[n for n in numbers(text) if n in profile.nodes] for text in row["stages"]]
    assert sorted(n for stage in stages for n in stage) == list(profile.nodes), row
    theirs_s, ours_s, ours = {}, {}, {}
    for name, objective in OBJECTIVES.items():
        theirs_s[name] = costed(objective(profile.layers(stages), **about), range(len(stages) + 1), m)
        stage_s = objective(line, **about)
        best = replicate(stage_s, devices=row["devices"])
        assert best is not None, "one stage is always allowed"
        ours[name], ours_s[name] = best.replicas, costed(stage_s, best.bounds, best.replicas)
    about |= {"source": row["source"], "printed_s": row["seconds"]}
    return Row(row["profile"], **about, theirs=m, ours=ours, theirs_s=theirs_s, ours_s=ours_s)


def checks_of(rows: Sequence[Row]) -> list[pairs.Check]:
    """Return what is asked: the planner's own cost comes out again, and ours is never slower."""
    checks = []
    for row in rows:
        if row.printed_s is not None:
            apart = abs(row.theirs_s["code"] / row.printed_s - 1)
            checks.append(pairs.at_most(f"{row.name}: apart from what it printed", ROUNDING, apart))
        for name in OBJECTIVES:
            ratio = row.ours_s[name] / row.theirs_s[name]
            checks.append(pairs.at_most(f"{row.name}: ours over theirs, {name}", 1 + ROUNDING, ratio))
    return checks


def line_of(row: Row) -> dict[str, Any]:
    """Return a row as a line of the table."""
    shown = {
        "profile": row.profile,
        "devices": row.devices,
        "GB/s": f"{row.bandwidth_bytes_per_s / 1e9:g}",
        "theirs": "-".join(map(str, row.theirs)),
    }
    for name in OBJECTIVES:
        shown[name] = f"{row.theirs_s[name] * 1e3:.2f}"
        shown[f"ours, {name}"] = "-".join(map(str, row.ours[name]))
        shown[f"{name} "] = f"{row.ours_s[name] * 1e3:.2f}"
    return shown | {"from": row.source}


def rows(only: Sequence[str] = ("",)) -> list[Row]:
    """Return the rows of some profiles."""
    known = json.loads((FOLDER / "planner.json").read_text(encoding="utf-8"))
    return [row_of(row) for row in known if row["profile"].startswith(tuple(only))]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per configuration, then the checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="profiles whose names begin so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(argv)
    found = rows(arguments.only)
    checks = checks_of(found)
    print(pairs.table([line_of(row) for row in found]))
    print(pairs.checks_text(checks))
    if arguments.json:
        content = {
            "benchmark": "pipedream",
            "checks": [asdict(c) for c in checks],
            "figures": [asdict(r) for r in found],
        }
        arguments.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
