"""How much of the sums over replicas is hidden: two replicas of a pipeline of two stages, over gloo, with a slow link.

    python -m benchmarks.overlap [--json FILE] [--repeats 9]

Layers wait 5 ms forward and backward, eight to a stage, and the link between replicas carries one sum at a time and
takes as long for a layer's: so a stage's sum is as long as its backward. Waiting needs no core. Three contenders take
turns, on all ranks: sums that take no time, sums as the runtime begins them (bucket by bucket, beside a stage's last
backward), and the same sums behind the last action. What the second takes longer than the first is not hidden. Each
layer is a bucket. Asked: at least 80% hidden, and a step of at most 1.05 times the simulated one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed import replicas
from autosplit.distributed.replicas import Reductions
from autosplit.distributed.world import World
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build
from autosplit.schedule.entry import Entry
from autosplit.schedule.order import lane_lists, with_reductions
from autosplit.schedule.simulate_lists import simulate_lists
from benchmarks import pairs

STAGES, LAYERS, CHUNKS, WAIT_S = 2, 8, 8, 0.005
LAYER_BYTES = 4 * (4 * 4 + 4)
ASKED_HIDDEN, ASKED_STEP = 0.8, 1.05
FREE, BESIDE, BEHIND = "sums take no time", "sums beside the backward", "sums behind the step"


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


class _Slow:
    """A sum that a link carries when it has carried those before."""

    def __init__(self, sums: Future[None], work: Any) -> None:
        self._sum, self._work = sums, work

    def wait(self) -> None:
        """Wait until it has arrived."""
        self._sum.result()
        self._work.wait()


@contextmanager
def slow_link(*, beside: bool) -> Iterator[None]:
    """Have each sum over replicas take as long as a layer."""
    begin = World.begin_to_add
    with ThreadPoolExecutor(1) as link:

        def begins(world: World, tensor: Tensor) -> _Slow:
            return _Slow(link.submit(time.sleep, WAIT_S), begin(world, tensor))

        late = nullcontext() if beside else mock.patch.object(Reductions, "beside", return_value=nullcontext())
        with mock.patch.object(World, "begin_to_add", begins), late:
            yield


def simulated_s(forward_s: float, backward_s: float) -> float:
    """Return the simulated step of the lists that ranks go through: each layer's sum takes as long as the link does."""
    schedule, takes_s = build("1f1b", stages=STAGES, microbatches=CHUNKS), {"F": forward_s, "B": backward_s}
    lists = map(with_reductions, lane_lists(schedule, [set(range(stage)[-1:]) for stage in range(STAGES)]))

    def seconds(entry: Entry) -> float:
        return takes_s[entry.kind] if isinstance(entry, Action) else 0.0

    spans = simulate_lists(lists, seconds=seconds, buckets_s=dict.fromkeys(range(STAGES), [WAIT_S] * LAYERS))
    return max(span.end_s for device in spans for span in device)


def alone(repeats: int) -> tuple[float, float]:
    """Return the median seconds that a stage's layers take for a microbatch, forward and backward."""
    layers, value = nn.Sequential(*(Waiting(WAIT_S) for _ in range(LAYERS))), torch.randn(1, 4)
    forwards, backwards = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        output = layers(value)
        middle = time.perf_counter()
        output.sum().backward()
        forwards.append(middle - start)
        backwards.append(time.perf_counter() - middle)
    return statistics.median(forwards), statistics.median(backwards)


def steps() -> dict[str, Callable[[], Any]]:
    """Return this rank's contenders."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, STAGES), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(*(Waiting(WAIT_S) for _ in range(STAGES * LAYERS)))
    value, target = torch.randn(2, CHUNKS, 4)
    pipe = autosplit(model, mesh=mesh, chunks=CHUNKS, schedule="1f1b", sample=value)

    def step() -> None:
        pipe.zero_grad()
        pipe.train_step(value, target=target, loss_fn=F.mse_loss)

    def slow(*, beside: bool) -> None:
        with slow_link(beside=beside):
            step()

    return {FREE: step, BESIDE: lambda: slow(beside=True), BEHIND: lambda: slow(beside=False)}


def measure(repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps, of the rank that took longest."""
    found: dict[str, list[float]] = {}
    contenders = steps()
    for turn in range(repeats + 1):
        for name in pairs.rotated(list(contenders), turn):
            dist.barrier()
            seconds = torch.tensor(pairs.read(contenders[name]).wall_s)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:
                found.setdefault(name, []).append(float(seconds))
    return found


def report(found: dict[str, list[float]], step_s: float, options: argparse.Namespace) -> None:
    """Print what was measured beside the simulated step, and write it."""
    machine, sum_s = pairs.facts(), LAYERS * WAIT_S
    longer = [own - free for own, free in zip(found[BESIDE], found[FREE], strict=True)]
    hidden = 1 - statistics.median(longer) / sum_s
    over = statistics.median(found[BESIDE]) / step_s
    checks = [
        pairs.at_least("part of the sum that is hidden", ASKED_HIDDEN, hidden),
        pairs.at_most("step over the simulated one", ASKED_STEP, over),
    ]
    figures = [{"contender": name, "seconds": pairs.Spread.of(seconds)} for name, seconds in found.items()]
    figures.append({"contender": "simulated", "seconds": pairs.Spread.of([step_s])})
    print(pairs.facts_text(machine))
    print(pairs.table([{"contender": own["contender"], "seconds": own["seconds"].text(3)} for own in figures]))
    settings = {"stages": STAGES, "layers": LAYERS, "chunks": CHUNKS, "wait_s": WAIT_S, "repeats": options.repeats}
    pairs.conclude(
        options.json, benchmark="overlap", settings=settings, machine=machine, figures=figures, checks=checks
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Time what the command line asks for."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not dist.is_torchelastic_launched():
        start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(2 * STAGES), "--module"]
        command = [sys.executable, "-m", *start, "benchmarks.overlap", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
    dist.init_process_group("gloo")
    with mock.patch.object(replicas, "BUCKET_BYTES", LAYER_BYTES):
        found = measure(options.repeats)
    step_s = simulated_s(*alone(options.repeats))  # on all ranks at once, as in a step
    if dist.get_rank() == 0:
        report(found, step_s, options)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
