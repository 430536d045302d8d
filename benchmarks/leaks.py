"""What a thousand training steps leave behind: resident memory, threads, objects.

    python -m benchmarks.leaks [--steps 1000] [--lanes threads] [--out FILE]

A model with dropout, batch norm, a skip and recompute, under each schedule; what is there after a hundred steps is
compared with what is there after a thousand more.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit

SCHEDULES: dict[str, dict[str, Any]] = {"1f1b": {}, "zb_h1": {}, "interleaved": {"virtual_stages": 2}}
WARM = 100
_STATUS = Path("/proc/self/status")


class Net(nn.Module):
    """Four layers with all that keeps state between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.1)

    def forward(self, value: Tensor) -> Tensor:
        first = self.norm(torch.tanh(self.layers[0](value)))
        for layer in self.layers[1:]:
            value = self.drop(torch.tanh(layer(first if layer is self.layers[1] else value)))
        return value + first


def resident_kib() -> int:
    """Return the resident memory of this process; Linux alone has it in a file."""
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def look() -> dict[str, int]:
    """Return what there is now."""
    gc.collect()
    return {"resident_kib": resident_kib(), "threads": threading.active_count(), "objects": len(gc.get_objects())}


def measure(schedule: str, *, lanes: str, steps: int) -> dict[str, Any]:
    """Train under a schedule and return what there is after the warm-up and after the steps."""
    torch.manual_seed(0)
    again = ["always", "never"] * (2 if "virtual_stages" in SCHEDULES[schedule] else 1)
    recompute: Any = again if schedule != "interleaved" else "always"
    pipe = autosplit(
        Net(), devices=2, chunks=4, schedule=schedule, lanes=lanes, recompute=recompute, **SCHEDULES[schedule]
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    value, target = torch.randn(16, 32), torch.randn(16, 32)
    found: list[dict[str, int]] = []
    for number in range(WARM + steps + 1):
        if number in (WARM, WARM + steps):
            found.append(look())
        optimizer.zero_grad()
        pipe.train_step(value, target=target, loss_fn=F.mse_loss)
        optimizer.step()
    pipe.unsplit()
    grown = found[1]["resident_kib"] / found[0]["resident_kib"] - 1
    return {"schedule": schedule, "before": found[0], "after": found[1], "resident_grown": round(grown, 5)}


def main(argv: Sequence[str] | None = None) -> None:
    """Print, or write, a JSON line per schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lanes", choices=("inline", "threads"), default="threads")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    runs = [measure(schedule, lanes=arguments.lanes, steps=arguments.steps) for schedule in SCHEDULES]
    asked = {"torch": torch.__version__, "steps": arguments.steps, "lanes": arguments.lanes}
    text = json.dumps({**asked, "runs": runs}, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
