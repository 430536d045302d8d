"""What a second replica of a slow stage is worth in one process: `train_step` and `train_stream` with and without it.

    python -m benchmarks.replicas [--json FILE] [--repeats 3] [--chunks 128] [--scales 1 4]

Three stages that wait 5, 10 and 5 ms per microbatch, forward and backward each, times a scale. Waiting lanes need no
core, so that the machine has as many devices as the plan. Alone the slow stage sets the pace; with two replicas all
stages are as fast, and whatever a lane does beside waiting (Python, the loss, the wait for a message) is in everybody's
way. Steps with and without are taken in turn; a ratio is of neighbours. A stream is read in its steady state, as many
minibatches as a step has microbatches. Asked: at least 1.9 times the throughput.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosplit import autosplit
from benchmarks import pairs

ASKED = 1.9
WAITS_S = (0.005, 0.010, 0.005)
REPLICAS = [1, 2, 1]


@torch.library.custom_op("autosplit_benchmarks::wait", mutates_args=())
def wait(value: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return the same value, later."""
    time.sleep(seconds)
    return value.clone()


@wait.register_fake
def _(value: torch.Tensor, seconds: float) -> torch.Tensor:
    return torch.empty_like(value)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.seconds = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return wait(gradient, ctx.seconds), None


wait.register_autograd(_backward, setup_context=_setup)


class Waiting(nn.Module):
    """A layer that waits."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, later."""
        return wait(torch.tanh(self.linear(value)), self.seconds)


class Steps:
    """Seconds of a training step of a pipe whose stages wait."""

    name = "step"

    def __init__(self, chunks: int, scale: int, replicas: list[int] | None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Waiting(scale * seconds) for seconds in WAITS_S))
        self.chunks, self.value, self.target = chunks, torch.randn(chunks, 4), torch.randn(chunks, 4)
        devices = ["cpu"] * sum(replicas or [1] * len(WAITS_S))
        planned = autosplit(
            copy.deepcopy(model), devices, chunks, replicas=replicas, schedule="1f1b", sample=self.value
        )
        assert planned.plan is not None
        self.pipe = autosplit(model, devices, plan=planned.plan.move({"0": 0, "1": 1, "2": 2}), sample=self.value)

    def __call__(self) -> float:
        """Run a step."""
        start = time.perf_counter()
        self.pipe.train_step(self.value, target=self.target, loss_fn=nn.functional.mse_loss)
        return time.perf_counter() - start


class Stream(Steps):
    """Seconds of as many minibatches of a stream as a step has microbatches, without filling and draining."""

    name = "stream"

    def __call__(self) -> float:
        """Run the stream."""
        item, filling = (self.value[:1], self.target[:1]), 2 * sum(REPLICAS)
        stream = self.pipe.train_stream(
            itertools.repeat(item, self.chunks + 2 * filling),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        )
        for _ in range(filling):
            next(stream)
        start = time.perf_counter()
        for _ in range(self.chunks):
            next(stream)
        seconds = time.perf_counter() - start
        stream.close()
        return seconds


def compared(repeats: int, chunks: int, scale: int, kind: type[Steps]) -> tuple[list[dict[str, str]], pairs.Check]:
    """Return a row with one device per stage and one with replicas, and what is asked of the ratio."""
    contenders = {"one each": kind(chunks, scale, None), "1-2-1": kind(chunks, scale, REPLICAS)}
    alone, dealt = contenders.values()
    dealt()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    ratios = []
    before = alone()
    for _ in range(repeats):
        own, after = dealt(), alone()
        ratios.append((before + after) / 2 / own)
        seconds["one each"].append(after)
        seconds["1-2-1"].append(own)
        before = after
    ratio = pairs.Spread.of(ratios)
    waits = ", ".join(f"{1e3 * scale * own:g}" for own in WAITS_S)
    rows = [
        {
            "of": kind.name,
            "waits in ms": waits,
            "replicas": name,
            "ms per microbatch": pairs.Spread.of(own).scaled(1e3 / chunks).text(2),
            "ratio": ratio.text(3) if name == "1-2-1" else "",
        }
        for name, own in seconds.items()
    ]
    return rows, pairs.at_least(
        f"{kind.name}, stages of {waits} ms, forward and backward: throughput", ASKED, ratio.median
    )


def main() -> None:
    """Print the figures, and write them where that is asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 4])
    given = parser.parse_args()
    found = [compared(given.repeats, given.chunks, *own) for own in itertools.product(given.scales, (Steps, Stream))]
    figures, checks = [row for rows, _ in found for row in rows], [check for _, check in found]
    print(pairs.table(figures))
    print(pairs.checks_text(checks))
    if given.json:
        settings = {"repeats": given.repeats, "chunks": given.chunks}
        machine = pairs.facts()
        pairs.write(
            given.json, benchmark="replicas", settings=settings, machine=machine, figures=figures, checks=checks
        )


if __name__ == "__main__":
    main()
