"""Unequal devices: sleeping lanes beside the simulated optimum, and beside accelerate's ``device_map="auto"``.

    python -m benchmarks.uneven [--json FILE] [--lanes 3] [--row-s 0.1] [--repeats 3]

Sixteen blocks, each a frozen product with a LoRA of rank 2 that trains, sleep 0.1 s per row, forward and backward, on a
lane of speed 1, and half as long on one of speed 2: sleeping needs no core, and what the blocks compute is next to
nothing. Lanes have memory limits in the proportions 24, 12, 12 (and 12), which are nearly all for frozen weights.

- optimum: of all orders of the lanes and all cuts into four stages per lane (interleaved; two where there are four
  lanes) that keep the limits, the shortest simulated step, with what a block of each speed takes alone.
- autosplit: its plan and its pipe. That lanes differ it is told by factors, as data sheets tell it of cards.
- accelerate: blocks go to lanes by its ``get_balanced_memory`` and ``infer_auto_device_map`` under the same limits, and
  run by the hooks of ``dispatch_model``. All its devices are the CPU here, so each block is told its lane's speed.

Batch, model and loss are the same, gradients are compared, and steps take turns. Asked of lanes of speeds 1, 1, 2: a
step of at most 1.02 times the optimum, and 0.9 of all lanes' speeds over the fastest alone, where the limits allow it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import PipelinedModule, autosplit
from autosplit.devices import Clock
from autosplit.options import Options
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.search import lineup
from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import simulate
from benchmarks import pairs

BLOCKS, WIDTH, CHUNKS = 16, 512, 8
BLOCK_BYTES = 4 * WIDTH * WIDTH
SPEEDS = (1.0, 1.0, 2.0, 1.0)
EACH = {2: 4, 3: 4, 4: 2}
"""Stages on each of so many lanes."""
ROOM = {"room for the best cut": 8.9, "limits that bind": 6.9}
"""How many blocks a lane of 12 holds; that of 24 holds twice as many."""
ASKED_STEP, ASKED_SPEED = 1.02, 0.9
OURS, THEIRS, ALONE = "autosplit", "accelerate", "fastest lane alone"
SPEED_OF: dict[str, float] = {}
"""The speed of each lane's thread."""
ROW_S = {1.0: 0.1}
"""The seconds of a row at a speed of 1."""


@torch.library.custom_op("autosplit_benchmarks::product", mutates_args=())
def product(value: Tensor, weight: Tensor, speed: float) -> Tensor:
    """Return the product, later, by its rows and a speed; 0: that of the thread's lane."""
    time.sleep(ROW_S[1.0] * value.shape[0] / (speed or SPEED_OF.get(threading.current_thread().name, 1.0)))
    return value @ weight


@product.register_fake
def _(value: Tensor, weight: Tensor, speed: float) -> Tensor:
    return value @ weight


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.weight, ctx.speed = inputs


def _backward(ctx: Any, gradient: Tensor) -> Any:
    return product(gradient, ctx.weight.t(), ctx.speed), None, None


product.register_autograd(_backward, setup_context=_setup)


class Block(nn.Module):
    """A frozen product with a LoRA, at a lane's speed."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up, self.speed = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False), speed

    def forward(self, value: Tensor) -> Tensor:
        """Return the block's output, later."""
        return torch.tanh(product(value, self.base.weight, self.speed) + self.up(self.down(value)))


def model(speed: float = 0.0) -> nn.Sequential:
    """Return the blocks, with the same values each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(speed) for _ in range(BLOCKS)))


@contextmanager
def unlike_lanes() -> Iterator[None]:
    """Tell the planner the speeds of lanes, which are numbered in the last bytes of their limits."""

    def speeds(options: Options) -> list[float]:
        assert isinstance(options.memory_limit, tuple)
        return [SPEEDS[(limit or 0) % 1024] for limit in options.memory_limit]

    def slowdowns(recorded: RecordedModel, options: Options, sizes: Any, costs: Any) -> tuple[float, ...]:
        return tuple(1 / speed for speed in speeds(options))

    def specs(options: Options) -> list[Any]:
        return [SimpleNamespace(name=speed) for speed in speeds(options)]

    def wall(clock: Clock, *, threads: int) -> None:
        clock._now_s = time.perf_counter

    with (
        mock.patch.object(Clock, "__init__", wall),  # a sleep takes no CPU seconds
        mock.patch.object(RecordedModel, "_slowdowns", slowdowns),
        mock.patch.object(lineup, "device_specs", specs),
    ):
        yield


def limits_of(lanes: int, room: float) -> list[int]:
    """Return the bytes of each lane: 24, 12, 12, ..., with its number."""
    return [int(room * BLOCK_BYTES * (2 if lane == 0 else 1)) // 1024 * 1024 + lane for lane in range(lanes)]


def piped(lanes: int, limits: Sequence[int], value: Tensor) -> PipelinedModule:
    """Return the pipe, whose lanes' threads have their speeds."""
    with unlike_lanes():
        pipe = autosplit(
            model(),
            devices=["cpu"] * lanes,
            chunks=CHUNKS,
            schedule="interleaved",
            virtual_stages=EACH[lanes],
            memory_limit=limits,
            recompute="never",
            sample=value,
        )
    assert pipe.plan is not None
    for stage in pipe.plan.stages:
        SPEED_OF[f"autosplit lane {stage.lane}"] = SPEEDS[(stage.memory.capacity_bytes or 0) % 1024]
    return pipe


def dispatched(lanes: int, limits: Sequence[int]) -> tuple[nn.Module | None, list[int]]:
    """Return the model as accelerate places and runs it, None where it leaves blocks to the disk; and each lane's."""
    plain, names = model(1.0), ["Block"]
    balanced = get_balanced_memory(plain, dict(enumerate(limits)), no_split_module_classes=names)
    placed = infer_auto_device_map(plain, balanced, no_split_module_classes=names)
    lane_of = [placed.get(str(block), placed.get("")) for block in range(BLOCKS)]
    counts = list(map(lane_of.count, range(lanes)))
    if sum(counts) < BLOCKS:
        return None, counts
    for block, lane in zip(plain, lane_of, strict=True):
        block.speed = SPEEDS[lane]
    return dispatch_model(plain, dict.fromkeys(placed, "cpu"), force_hooks=True), counts


def optimum(lanes: int, limits: Sequence[int], takes_s: dict[float, tuple[float, float]]) -> tuple[float, list[int]]:
    """Return the shortest simulated step of all cuts and orders within the limits, and the blocks of its stages."""
    schedule = build("interleaved", stages=lanes * EACH[lanes], microbatches=CHUNKS, virtual_stages=EACH[lanes])
    fit = [limit // BLOCK_BYTES for limit in limits]
    orders = {tuple((SPEEDS[lane], fit[lane]) for lane in order) for order in itertools.permutations(range(lanes))}
    best: tuple[float, list[int]] = (float("inf"), [])
    for ends in itertools.combinations(range(1, BLOCKS), lanes * EACH[lanes] - 1):
        counts = [end - start for start, end in zip((0, *ends), (*ends, BLOCKS), strict=True)]
        held = [sum(counts[stage] for stage in schedule.stages_on(lane)) for lane in range(lanes)]
        for order in orders:
            if all(count <= most for count, (_, most) in zip(held, order, strict=True)):
                each = [takes_s[order[schedule.stage_lane[stage]][0]] for stage in range(lanes * EACH[lanes])]
                forward, backward = ([n * pair[i] for n, pair in zip(counts, each, strict=True)] for i in (0, 1))
                best = min(best, (simulate(schedule, forward_s=forward, backward_s=backward).step_s, counts))
    return best


def alone(repeats: int) -> dict[float, tuple[float, float]]:
    """Return the median seconds of a block for a row, forward and backward, by its speed."""
    found = {}
    for speed in set(SPEEDS):
        blocks, forwards, backwards = model(speed), [], []
        for _ in range(repeats):
            start = time.perf_counter()
            output = blocks(torch.randn(1, WIDTH))
            middle = time.perf_counter()
            output.sum().backward()
            forwards.append((middle - start) / BLOCKS)
            backwards.append((time.perf_counter() - middle) / BLOCKS)
        found[speed] = statistics.median(forwards), statistics.median(backwards)
    return found


def measured(lanes: int, room: str, repeats: int) -> tuple[dict[str, Any], list[pairs.Check]]:
    """Return the figures of so many lanes, and what is asked of them."""
    limits = limits_of(lanes, ROOM[room])
    torch.manual_seed(1)
    value, target = torch.randn(2, CHUNKS, WIDTH)
    pipe, (theirs, blocks) = piped(lanes, limits, value), dispatched(lanes, limits)
    fast = model(max(SPEEDS[:lanes]))

    def eager(net: nn.Module) -> Callable[[], None]:
        return lambda: (net.zero_grad(), F.mse_loss(net(value), target).backward())[-1]

    def ours() -> None:
        pipe.zero_grad()
        pipe.train_step(value, target=target, loss_fn=F.mse_loss)

    contenders = {OURS: ours, ALONE: eager(fast)} | ({} if theirs is None else {THEIRS: eager(theirs)})
    readings = pairs.interleave(contenders, repeats=repeats)
    for net in filter(None, (theirs, fast)):
        for left, right in zip(pipe.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-6)
    seconds = {name: [reading.wall_s for reading in each] for name, each in readings.items()}
    step_s, fast_s = (statistics.median(seconds[name]) for name in (OURS, ALONE))
    best_s, counts = optimum(lanes, limits, alone(repeats))
    of_all = fast_s / step_s * max(SPEEDS[:lanes]) / sum(SPEEDS[:lanes])
    row = {
        "lanes": f"{lanes}, speeds {', '.join(f'{speed:g}' for speed in SPEEDS[:lanes])}, {room}",
        "step": pairs.Spread.of(seconds[OURS]),
        "over the optimum": step_s / best_s,
        "optimum of all speeds": fast_s / best_s * max(SPEEDS[:lanes]) / sum(SPEEDS[:lanes]),
        "of all speeds": of_all,
        "accelerate over autosplit": pairs.Spread.of([a / b for a, b in zip(others, seconds[OURS], strict=True)])
        if (others := seconds.get(THEIRS))
        else "accelerate leaves blocks to the disk",
        "accelerate's blocks": blocks,
        "optimum's blocks": counts,
        "autosplit's blocks": [sum(n.endswith("/tanh_0") for n in stage.nodes) for stage in pipe.plan.stages],  # type: ignore[union-attr]
    }
    checks = []
    if lanes == 3:
        checks.append(pairs.at_most(f"{row['lanes']}: step over the optimum", ASKED_STEP, step_s / best_s))
        if room == next(iter(ROOM)):
            checks.append(pairs.at_least(f"{row['lanes']}: of all lanes' speeds", ASKED_SPEED, of_all))
    return row, checks


def main(argv: Sequence[str] | None = None) -> int:
    """Time what the command line asks for."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--lanes", type=int, nargs="+", default=[3, 2, 4], choices=sorted(EACH))
    parser.add_argument("--row-s", type=float, default=0.1, help="seconds of a row")
    options: argparse.Namespace = parser.parse_args(argv)
    torch.set_num_threads(1)
    ROW_S[1.0] = options.row_s
    machine, figures, checks = pairs.facts(), [], []
    for lanes, room in itertools.product(options.lanes, ROOM):
        if lanes != 3 and room != next(iter(ROOM)):
            continue
        row, asked = measured(lanes, room, options.repeats)
        figures.append(row)
        checks += asked
        print(row, flush=True)
    settings = {"blocks": BLOCKS, "chunks": CHUNKS, "stages_per_lane": EACH} | vars(options) | {"json": ""}
    print(pairs.facts_text(machine))
    pairs.conclude(options.json, benchmark="uneven", settings=settings, machine=machine, figures=figures, checks=checks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
