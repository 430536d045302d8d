"""What a (stage, microbatch) cell costs beyond the work itself: tiny stages against a loop written by hand.

    python -m benchmarks.overhead [--json FILE] [--repeats 100] [--only CONTENDER ...] [--kinds linear ...]

The hand loop runs the same modules on the same microbatches on one thread: ``tensor_split``, the loop, ``cat``, then
the loss and one ``backward``; beside `train_step` it has a loss and a ``backward`` per microbatch, as that does. Every
contender's reading stands beside a reading of the hand loop, taken just before or just after it:

    overhead per cell = (median of the contender - median of its hand loop) / (stages x microbatches)

in µs on the clock (wall), of CPU over all threads, and of CPU of the calling thread; in brackets the quartiles of the
pairs' differences. ``forward`` is without gradients, ``forward (grad)`` builds the graph and drops it, ``call`` is
``loss_fn(pipe(x), y).backward()``, ``gpipe`` and ``1f1b`` are `train_step`. Asked of the wall: inline forward 10 µs,
inline forward and backward 60 µs, threads forward and backward 100 µs, of the call and of `train_step`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosplit import autosplit
from benchmarks import pairs

WIDTH = 16
ROWS = 2
LANES = ("inline", "threads")
FORWARD, FORWARD_GRAD, CALL = "forward", "forward (grad)", "call"
HOW = (FORWARD, FORWARD_GRAD, CALL, "gpipe", "1f1b")
PEER = "torchgpipe"
NAMES = (*(f"{lanes} {how}" for lanes in LANES for how in HOW), *(f"{PEER} {how}" for how in HOW[:3]))
ASKED_US = {
    **dict.fromkeys((f"inline {FORWARD}", f"inline {FORWARD_GRAD}"), 10.0),
    **dict.fromkeys((f"inline {CALL}", "inline gpipe", "inline 1f1b"), 60.0),
    **dict.fromkeys((f"threads {CALL}", "threads gpipe", "threads 1f1b"), 100.0),
}
CLOCKS = {"wall": "wall_s", "CPU": "process_s", "CPU of caller": "thread_s"}


class Scale(nn.Module):
    """One multiplication, the smallest stage that has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "scale": Scale,
    "norm": lambda: nn.LayerNorm(WIDTH),
}


@dataclass(frozen=True)
class Bench:
    """A model of equal tiny stages, a batch, and every way to run them."""

    model: nn.Sequential
    stages: int
    chunks: int
    batch: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, kind: str, *, stages: int, chunks: int) -> Bench:
        """Return the bench for one kind of stage, with the same weights and rows every time."""
        torch.manual_seed(0)
        model = nn.Sequential(*(KINDS[kind]() for _ in range(stages)))
        batch, target = torch.randn(chunks * ROWS, WIDTH), torch.randn(chunks * ROWS, WIDTH)
        return cls(model, stages, chunks, batch, target)

    @property
    def cells(self) -> int:
        """Number of (stage, microbatch) cells."""
        return self.stages * self.chunks

    def hand(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's output by a loop over microbatches."""
        outputs = []
        for value in x.tensor_split(self.chunks):
            for stage in self.model:
                value = stage(value)
            outputs.append(value)
        return torch.cat(outputs)

    def run(self, forward: Callable[[torch.Tensor], torch.Tensor], how: str) -> Callable[[], Any]:
        """Return what runs a pipelined forward in one of the ways that are no `train_step`."""
        loss_fn, batch, target = nn.MSELoss(), self.batch, self.target
        if how == FORWARD:

            def without_gradients() -> torch.Tensor:
                with torch.no_grad():
                    return forward(batch)

            return without_gradients
        if how == FORWARD_GRAD:
            return lambda: forward(batch)
        return lambda: loss_fn(forward(batch), target).backward()

    def reference(self, name: str) -> Callable[[], Any]:
        """Return the hand loop that does what contender ``name`` does."""
        how = name.partition(" ")[2]
        return self.run(self.hand, how) if how in HOW[:3] else self.hand_step

    def hand_step(self) -> None:
        """Run a training step by a loop over microbatches, each with its share of the loss and its backward."""
        loss_fn, count = nn.MSELoss(), self.chunks
        for x, target in zip(self.batch.tensor_split(count), self.target.tensor_split(count), strict=True):
            (loss_fn(self.model(x), target) / count).backward()

    def contender(self, name: str) -> Callable[[], Any]:
        """Return what ``name`` times."""
        system, _, how = name.partition(" ")
        if system == PEER:
            peer = pairs.torchgpipe()
            assert peer is not None
            devices = ["cpu"] * self.stages
            return self.run(
                peer.GPipe(self.model, [1] * self.stages, devices=devices, chunks=self.chunks, checkpoint="never"), how
            )
        pipe = self._pipe(system, "gpipe" if how == "gpipe" else "1f1b")
        if how in HOW[:3]:
            return self.run(pipe, how)
        loss_fn = nn.MSELoss()
        return lambda: pipe.train_step(self.batch, target=self.target, loss_fn=loss_fn)

    def _pipe(self, lanes: str, schedule: str) -> Any:
        """Return the pipe, one stage per device."""
        devices = ["cpu"] * self.stages
        pipe = autosplit(
            self.model, devices=devices, chunks=self.chunks, sample=self.batch, schedule=schedule, lanes=lanes
        )
        assert pipe.plan is not None
        cut = [stage.modules for stage in pipe.plan.stages]
        assert cut == [(str(stage),) for stage in range(self.stages)], cut
        return pipe


def measure(kind: str, bench: Bench, names: Sequence[str], *, repeats: int, calls: int) -> list[dict[str, Any]]:
    """Time the contenders on one kind of stage beside their hand loops and return a figure for each."""
    gc.collect()  # the pipes of the case before, whose lanes are threads, end here
    contenders = {name: bench.contender(name) for name in names}
    references = {name: bench.reference(name) for name in names}
    found = pairs.paired(contenders, references, repeats=repeats, calls=calls)
    figures: list[dict[str, Any]] = []
    for name in names:
        seconds = {
            who: {clock: pairs.Spread.of([getattr(r, clock) for r in readings]) for clock in CLOCKS.values()}
            for who, readings in (("ours", found[name].ours), ("hand", found[name].reference))
        }
        per_cell = {clock: found[name].overhead(clock, cells=bench.cells) for clock in CLOCKS.values()}
        figures.append({"kind": kind, "contender": name, **seconds, "overhead_per_cell": per_cell})
    return figures


def row(figure: dict[str, Any]) -> dict[str, str]:
    """Return a figure as a line of the table, in µs."""
    return {
        "stage": figure["kind"],
        "contender": figure["contender"],
        "hand µs": f"{figure['hand']['wall_s'].median * 1e6:.0f}",
        "measured µs": f"{figure['ours']['wall_s'].median * 1e6:.0f}",
        **{
            f"{title} per cell": figure["overhead_per_cell"][clock].scaled(1e6).text()
            for title, clock in CLOCKS.items()
        },
    }


def checks_of(figures: Sequence[dict[str, Any]]) -> list[pairs.Check]:
    """Return what is asked of the wall overhead per cell, in µs."""
    return [
        pairs.at_most(
            f"{figure['kind']}, {figure['contender']}, overhead per cell in µs",
            ASKED_US[figure["contender"]],
            figure["overhead_per_cell"]["wall_s"].median * 1e6,
        )
        for figure in figures
        if figure["contender"] in ASKED_US
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="CONTENDER", help=", ".join(NAMES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of stages")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=100, help="pairs of readings")
    parser.add_argument("--calls", type=int, default=3, help="calls per reading, one after the other")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per kind of stage and contender, then the checks."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    print(f"{arguments.stages} stages, {arguments.chunks} microbatches of {ROWS} x {WIDTH}")
    names = list(arguments.only)
    if pairs.torchgpipe() is None and any(name.startswith(PEER) for name in names):
        print("torchgpipe is not installed; going on without it")
        names = [name for name in names if not name.startswith(PEER)]
    figures: list[dict[str, Any]] = []
    for kind in arguments.kinds:
        bench = Bench.of(kind, stages=arguments.stages, chunks=arguments.chunks)
        figures += measure(kind, bench, names, repeats=arguments.repeats, calls=arguments.calls)
    print(pairs.table([row(figure) for figure in figures]))
    checks = checks_of(figures)
    print(pairs.checks_text(checks))
    if arguments.json:
        settings = {key: getattr(arguments, key) for key in ("kinds", "stages", "chunks", "repeats", "calls")}
        pairs.write(
            arguments.json,
            benchmark="overhead",
            settings={**settings, "rows": ROWS, "width": WIDTH, "only": names},
            machine=machine,
            figures=figures,
            checks=checks,
        )


if __name__ == "__main__":
    main()
