"""A stream of minibatches against its bound: how fast `train_stream` is, and what its versions of the weights take.

    python -m benchmarks.stream [--json FILE] [--repeats 5] [--rows 256 1024 4096] [--only throughput]

**Throughput.** Two stages of the same work on two lanes, each with a thread of its own. The hand loop is a thread per
stage that runs its layers (the last one the loss too) forward and backward and its optimizer's step on the same
minibatch over and over, and waits for nobody: the slower one's seconds per minibatch are the bound, one minibatch per
bottleneck time. Readings are taken in turn; a ratio is of neighbours. Asked: at least 0.97 of the bound, and at least
what synchronous 1F1B reaches with microbatches of the same size, of which ``chunks`` make a step. What the machine
leaves of the bound says a third contender, the same two threads as a pipeline written by hand: 1F1B with stashed
weights through two queues. A stage may then be ahead by no more than its warm-up, so each wait of one thread is soon
one of both. ``--rows`` are those of a minibatch: with more of them a stage computes for longer.

**Memory.** Live tensors are counted when the pipeline is full and all lanes wait, and again when it is drained; the
difference is the versions beside the newest, and what minibatches in flight keep, which is small here (they are not
cut, so that no gradients add up). Asked: within 3% of ``pipe.plan.version_bytes(staleness)``.
"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from autosplit import autosplit
from autosplit.schedule.stream import STALENESS
from benchmarks import pairs

CPU = torch.device("cpu")
CHUNKS = 8
ROWS = 64 * 256
"""How many rows a reading takes; two synchronous steps at least."""
ASKED_BOUND, ASKED_MEMORY = 0.97, 0.03


def _layers(width: int, count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


class Throughput:
    """The contenders on one model; each call of a contender is seconds per minibatch."""

    def __init__(self, *, width: int = 256, rows: int = 256, layers: int = 8) -> None:
        self.minibatches = max(2 * CHUNKS, ROWS // rows)
        self.model = _layers(width, layers)
        self.batch, self.target = torch.randn(rows, width), torch.randn(rows, width)
        self.optimizer = _sgd(self.model.parameters())
        large = torch.randn(rows * CHUNKS, width)
        self.pipe = autosplit(self.model, devices=[CPU] * 2, chunks=CHUNKS, sample=large, schedule="1f1b")
        self.loss = nn.MSELoss()
        self.large = large, torch.randn_like(large)
        cut = layers // 2
        self.halves = [list(self.model[:cut]), list(self.model[cut:])]

    def hand(self) -> float:
        """Run each stage by itself in a thread, both at the same time; the slower one's seconds."""
        seconds: list[float] = []

        def work(stage: nn.Sequential, last: bool) -> None:
            torch.set_num_threads(1)
            optimizer = _sgd(stage.parameters())
            gradient = torch.randn_like(self.batch)
            start = time.perf_counter()
            for _ in range(self.minibatches):
                output = stage(self.batch.detach().requires_grad_())
                if last:
                    self.loss(output, self.target).backward()
                else:
                    output.backward(gradient)
                optimizer.step()
                optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)

        copies = [nn.Sequential(*half) for half in self.halves]
        threads = [threading.Thread(target=work, args=(copy, copy is copies[-1])) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(seconds) / self.minibatches

    def by_hand(self) -> float:
        """Return the seconds per minibatch of a pipeline of two threads that does what "stash" does."""
        first, second = (copy.deepcopy(nn.Sequential(*half)) for half in self.halves)
        values: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        gradients: SimpleQueue[Any] = SimpleQueue()
        seconds: list[float] = []

        def begin() -> None:
            torch.set_num_threads(1)
            optimizer, kept = _sgd(first.parameters()), SimpleQueue[Any]()

            def forward() -> None:
                weights = {name: own.detach().clone().requires_grad_() for name, own in first.named_parameters()}
                value = torch.func.functional_call(first, weights, (self.batch,))
                kept.put((value, list(weights.values())))
                values.put(value.detach())

            forward()
            forward()
            start = time.perf_counter()
            for _ in range(self.minibatches):
                value, weights = kept.get()
                found = torch.autograd.grad(value, weights, gradients.get())
                for parameter, gradient in zip(first.parameters(), found, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad()
                forward()
            seconds.append(time.perf_counter() - start)
            values.put(None)

        def finish() -> None:
            torch.set_num_threads(1)
            optimizer = _sgd(second.parameters())
            while (value := values.get()) is not None:
                value.requires_grad_()
                self.loss(second(value), self.target).backward()
                gradients.put(value.grad)
                optimizer.step()
                optimizer.zero_grad()

        threads = [threading.Thread(target=run) for run in (begin, finish)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seconds[0] / self.minibatches

    def stream(self, staleness: str) -> float:
        """Return the seconds per minibatch of a stream in steady state: without filling and draining."""
        under = self.large if staleness == "2bw" else (self.batch, self.target)
        each = CHUNKS if staleness == "2bw" else 1
        count = self.minibatches // each
        items = itertools.repeat(under, count + 8)
        stream = self.pipe.train_stream(items, loss_fn=self.loss, optimizer=self.optimizer, staleness=staleness)
        for _ in range(4):
            next(stream)
        start = time.perf_counter()
        for _ in range(count):
            next(stream)
        seconds = time.perf_counter() - start
        stream.close()
        return seconds / count / each

    def synchronous(self) -> float:
        """Return the seconds per microbatch of `train_step` and an optimizer's step."""
        batch, target = self.large
        steps = self.minibatches // CHUNKS
        start = time.perf_counter()
        for _ in range(steps):
            self.pipe.train_step(batch, target=target, loss_fn=self.loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / steps / CHUNKS


def throughput(repeats: int, rows: int) -> tuple[list[dict[str, Any]], list[pairs.Check]]:
    """Return a row per contender, as shares of the bound, and what is asked."""
    bench = Throughput(rows=rows)
    contenders: dict[str, Callable[[], float]] = {
        **{f"stream {name}": (lambda name=name: bench.stream(name)) for name in STALENESS},
        "synchronous 1f1b": bench.synchronous,
        "pipeline by hand": bench.by_hand,
    }
    shares: dict[str, list[float]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in (*contenders, "hand")}
    for contender in contenders.values():
        contender()
    for turn in range(repeats):
        for name in pairs.rotated(list(contenders), turn):
            before = bench.hand()
            own = contenders[name]()
            bound = (before + bench.hand()) / 2
            shares[name].append(bound / own)
            seconds[name].append(own)
            seconds["hand"].append(bound)
    found = [
        {
            "rows": rows,
            "contender": name,
            "ms per minibatch": pairs.Spread.of(seconds[name]).scaled(1e3).text(2),
            "of the bound": pairs.Spread.of(shares[name]).text(3),
        }
        for name in contenders
    ]
    medians = {name: pairs.Spread.of(own).median for name, own in shares.items()}
    stash = medians["stream stash"]
    checks = [
        pairs.at_least(f"{rows} rows: share of the bound", ASKED_BOUND, stash),
        pairs.at_least(f"{rows} rows: over synchronous 1F1B", 1.0, stash / medians["synchronous 1f1b"]),
        pairs.at_least(f"{rows} rows: over the pipeline by hand", ASKED_BOUND, stash / medians["pipeline by hand"]),
    ]
    return found, checks


def _live_bytes() -> int:
    """Return the bytes of all memory that tensors of this process have."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory(stages: int = 4, width: int = 700) -> tuple[list[dict[str, Any]], list[pairs.Check]]:
    """Return a row per staleness: what versions were predicted to take, and what they did."""
    model = _layers(width, stages * 2)
    batch = torch.randn(stages, width)
    pipe = autosplit(model, devices=[CPU] * stages, chunks=1, sample=batch)
    rows, checks = [], []
    for staleness in STALENESS:
        items = itertools.repeat((batch, batch), 4 * stages)
        stream = pipe.train_stream(items, loss_fn=nn.MSELoss(), optimizer=_sgd, staleness=staleness)
        for _ in range(2 * stages):
            next(stream)
        time.sleep(1)  # until every lane waits for the next minibatch, and holds no gradients
        with stream.paused():
            full = _live_bytes()
        stream.drain()
        measured, predicted = full - _live_bytes(), sum(pipe.plan.version_bytes(staleness))
        error = measured / predicted - 1
        rows.append({"staleness": staleness, "predicted": predicted, "measured": measured, "error": f"{error:+.1%}"})
        checks.append(pairs.at_most(f"{staleness}: error of the versions' bytes", ASKED_MEMORY, abs(error)))
    return rows, checks


def main(arguments: list[str] | None = None) -> None:
    """Print the tables and what is asked; write them with ``--json``."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--only", choices=("throughput", "memory"))
    given = parser.parse_args(arguments)
    figures: list[dict[str, Any]] = []
    checks: list[pairs.Check] = []
    benches = [("throughput", lambda rows=rows: throughput(given.repeats, rows)) for rows in given.rows]
    for name, run in (*benches, ("memory", memory)):
        if given.only in (None, name):
            rows, own = run()
            print(pairs.table(rows))
            figures += rows
            checks += own
    settings, machine = {"repeats": given.repeats, "rows": given.rows}, pairs.facts()
    pairs.conclude(given.json, benchmark="stream", settings=settings, machine=machine, figures=figures, checks=checks)


if __name__ == "__main__":
    main()
