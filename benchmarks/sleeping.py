"""The simulated step beside the measured one, in every schedule, on stages that wait.

    python -m benchmarks.sleeping [--json FILE] [--repeats 7]

Four lanes on threads, 16 layers and 8 microbatches. A layer waits 5 ms forward, 5 ms backward, and 5 ms for the
gradient of its weight where the schedule puts that off. Waiting needs no core. The simulated step is that of the
lanes' lists, with the seconds that a layer takes alone. Asked: both within 5% of each other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build, stages_per_device
from autosplit.schedule.entry import Entry
from autosplit.schedule.order import lane_lists
from autosplit.schedule.simulate_lists import simulate_lists
from autosplit.weight_gradients import Product
from benchmarks import pairs
from benchmarks.overlap import LAYERS as STAGE_LAYERS
from benchmarks.overlap import WAIT_S, Waiting, alone

LANES, LAYERS, CHUNKS = 4, 16, 8
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v")


gradients = Product.gradients


def late_gradients(product: Product) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the gradients of a product that was put off, later."""
    time.sleep(WAIT_S)
    return gradients(product)


def simulated_s(name: str, forward_s: float, backward_s: float) -> float:
    """Return the simulated step of a schedule's lists, by the seconds of one layer."""
    stages = LANES * stages_per_device(name, 1)
    schedule = build(name, stages=stages, microbatches=CHUNKS)
    layer_s = {"F": forward_s, "B": backward_s, "I": backward_s, "W": WAIT_S}

    def seconds(entry: Entry) -> float:
        return layer_s[entry.kind] * LAYERS / stages if isinstance(entry, Action) else 0.0

    spans = simulate_lists(lane_lists(schedule, [set(range(s)[-1:]) for s in range(stages)]), seconds=seconds)
    return max(span.end_s for device in spans for span in device)


def measured_s(name: str, repeats: int) -> list[float]:
    """Return the seconds of a schedule's steps."""
    value, target = torch.randn(2, CHUNKS, 4)
    model = nn.Sequential(*(Waiting(WAIT_S) for _ in range(LAYERS)))
    pipe = autosplit(model, devices=["cpu"] * LANES, chunks=CHUNKS, schedule=name, lanes="threads", sample=value)

    def step() -> Any:
        pipe.zero_grad()
        return pipe.train_step(value, target=target, loss_fn=F.mse_loss)

    step()
    return [pairs.read(step).wall_s for _ in range(repeats)]


def main(argv: Sequence[str] | None = None) -> int:
    """Time what the command line asks for."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="steps of each schedule")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    machine, figures, rows, checks = pairs.facts(), [], [], []
    forward_s, backward_s = (seconds / STAGE_LAYERS for seconds in alone(options.repeats))
    with mock.patch.object(Product, "gradients", late_gradients):
        for name in SCHEDULES:
            simulated = simulated_s(name, forward_s, backward_s)
            measured = pairs.Spread.of(measured_s(name, options.repeats))
            figures.append({"schedule": name, "simulated_s": simulated, "seconds": measured})
            rows.append({"schedule": name, "simulated": f"{simulated:.3f}", "seconds": measured.text(3)})
            checks.append(pairs.at_most(f"{name}: off by", 0.05, abs(measured.median / simulated - 1)))
    print(f"{pairs.facts_text(machine)}\n{pairs.table(rows)}")
    settings = {"lanes": LANES, "layers": LAYERS, "chunks": CHUNKS, "wait_s": WAIT_S, "repeats": options.repeats}
    pairs.conclude(
        options.json, benchmark="sleeping", settings=settings, machine=machine, figures=figures, checks=checks
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
