"""Trainer with batches of one row and an accumulation of eight: what it gains by one schedule for all eight.

    OMP_NUM_THREADS=1 python -m benchmarks.accumulation [--json FILE] [--steps 12]

transformers' Trainer takes the plain model, a pipe, and a pipe by `MicrobatchesFromAccumulation`. Layers sleep in
forward and backward, so lanes need no cores of their own: what is measured is the order of the work. A simulated step
of 1F1B with 8 microbatches on S lanes is 8 S / (8 + S - 1) times as fast as the plain one. A reading is an optimizer's
step, from one ``on_step_end`` to the next; the first three, which record and plan, do not count. Asked: within 10% of
the simulated gain.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from autosplit import autosplit
from autosplit.trainers import MicrobatchesFromAccumulation
from benchmarks import pairs
from benchmarks.overlap import Waiting

BATCHES, LAYERS, WAIT_S = 8, 6, 0.01
PLAIN, CALLS, TOGETHER = "plain model", "pipe, batch by batch", "pipe, one schedule"
ASKED = 0.9
_FIRST = 3


class WaitingNet(nn.Module):
    """Layers that wait, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Waiting(WAIT_S) for _ in range(LAYERS)))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": F.mse_loss(self.layers(values), labels)}


class PipelineTrainer(MicrobatchesFromAccumulation, Trainer):
    """Trainer with one schedule for the batches of an accumulation."""


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends_s.append(time.perf_counter())


def seconds(contender: str, lanes: int, steps: int) -> list[float]:
    """Return the seconds of a contender's steps."""
    torch.manual_seed(0)
    pipe: Any = WaitingNet()
    if contender != PLAIN:
        pipe = autosplit(pipe, devices=lanes, chunks=BATCHES, schedule="1f1b")
    kind, clock = PipelineTrainer if contender == TOGETHER else Trainer, _Clock()
    settings: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCHES}
    settings |= {"max_steps": _FIRST + steps, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    settings |= {"use_cpu": True, "dataloader_pin_memory": False, "logging_strategy": "no"}
    args = TrainingArguments(tempfile.mkdtemp(), **settings)
    rows = [{"values": torch.randn(4), "labels": torch.randn(4)} for _ in range(BATCHES * (_FIRST + steps))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*collapsed.*")
        kind(model=pipe, args=args, train_dataset=rows, callbacks=[clock]).train()
    return [after - before for before, after in zip(clock.ends_s, clock.ends_s[1:], strict=False)][_FIRST - 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    """Time what the command line asks for."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="steps that count")
    options = parser.parse_args(argv)
    machine, figures, checks = pairs.facts(), [], []
    for lanes in (2, 3):
        found = {name: seconds(name, lanes, options.steps) for name in (PLAIN, CALLS, TOGETHER)}
        gain = {name: statistics.median(found[PLAIN]) / statistics.median(each) for name, each in found.items()}
        figures += [
            {"lanes": lanes, "contender": name, "gain": gain[name], "seconds": pairs.Spread.of(each)}
            for name, each in found.items()
        ]
        bound = BATCHES * lanes / (BATCHES + lanes - 1)
        name = f"share of the simulated gain of {bound:.2f}, {lanes} lanes"
        checks.append(pairs.at_least(name, ASKED, gain[TOGETHER] / bound))
    print(pairs.facts_text(machine))
    print(pairs.table([f | {"gain": f"{f['gain']:.2f}", "seconds": f["seconds"].text(3)} for f in figures]))
    settings = {"batches": BATCHES, "layers": LAYERS, "wait_s": WAIT_S, "steps": options.steps}
    pairs.conclude(
        options.json, benchmark="accumulation", settings=settings, machine=machine, figures=figures, checks=checks
    )
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
