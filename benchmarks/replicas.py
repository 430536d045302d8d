"""What a second replica of a slow stage is worth in one process: `train_step` and `train_stream` with and without it.

    python -m benchmarks.replicas [--json FILE] [--repeats 3] [--chunks 128] [--scales 1 4]

Three stages that wait 5, 10 and 5 ms per microbatch, forward and backward each, times a scale. Waiting lanes need no
core, so that the machine has as many devices as the plan. Alone the slow stage sets the pace; with two replicas all
stages are as fast, and whatever a lane does beside waiting (Python, the loss, the wait for a message) is in everybody's
way. Steps with and without are taken in turn; a ratio is of neighbours. A stream is read in its steady state, as many
minibatches as a step has microbatches. The loops by hand have the same lanes and no pipeline: their ratio is the bound.
Asked: at least 1.9 times the throughput.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import threading
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


class HandLoop(Steps):
    """Seconds of the same lanes without a pipeline: each runs its stage, and the last one the loss, from memory.

    No lane waits for another, so that the longest is what a pipeline can reach at best.
    """

    name = "hand loop"

    def __init__(self, chunks: int, scale: int, replicas: list[int] | None) -> None:
        self.chunks = chunks
        counts = replicas or [1] * len(WAITS_S)
        self.lanes = [
            (Waiting(scale * seconds), chunks // count, place == len(WAITS_S) - 1)
            for place, (seconds, count) in enumerate(zip(WAITS_S, counts, strict=True))
            for _ in range(count)
        ]

    def __call__(self) -> float:
        """Run the loops side by side."""
        lanes = [threading.Thread(target=self._run, args=lane) for lane in self.lanes]
        start = time.perf_counter()
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        return time.perf_counter() - start

    @staticmethod
    def _run(stage: nn.Module, count: int, with_loss: bool) -> None:
        value, gradient = torch.randn(1, 4, requires_grad=True), torch.randn(1, 4)
        for _ in range(count):
            output = stage(value)
            if with_loss:
                nn.functional.mse_loss(output, gradient).backward()
            else:
                output.backward(gradient)


def compared(
    repeats: int, chunks: int, scale: int, kind: type[Steps]
) -> tuple[list[dict[str, str]], list[pairs.Check]]:
    """Return a row with one device per stage and one with replicas, and what is asked of a pipeline's ratio."""
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
    asked = f"{kind.name}, stages of {waits} ms, forward and backward: throughput"
    return rows, [] if kind is HandLoop else [pairs.at_least(asked, ASKED, ratio.median)]


def main() -> None:
    """Print the figures, and write them where that is asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 4])
    given = parser.parse_args()
    found = [
        compared(given.repeats, given.chunks, *own)
        for own in itertools.product(given.scales, (HandLoop, Steps, Stream))
    ]
    figures, checks = (list(itertools.chain.from_iterable(part)) for part in zip(*found, strict=True))
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
