"""How long it takes to split a model: recording, value probe, profiling on the device, solving and lowering together.

    python -m benchmarks.split_seconds [--repeats 3]

Each split runs in a process of its own, so that nothing is warm. Printed are wall and CPU seconds: minimum, median and
maximum over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from examples.models import GPT, GPTConfig, ResNet


def gpt2_small() -> tuple[nn.Module, torch.Tensor]:
    """Return GPT-2-small's shape (12 layers, 768 wide) and a batch of 4 x 128 tokens."""
    config = GPTConfig.gpt2_small()
    return GPT(config), torch.randint(0, 50257, (4, 128))


def resnet50() -> tuple[nn.Module, torch.Tensor]:
    """Return ResNet-50 and a batch of 8 x 3 x 224 x 224 images."""
    return ResNet(), torch.randn(8, 3, 224, 224)


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"gpt2-small": gpt2_small, "resnet50": resnet50}


def measure(case: str) -> dict[str, Any]:
    """Split one model in this process and return its seconds."""
    from autosplit import autosplit

    torch.manual_seed(0)
    model, batch = CASES[case]()
    wall, cpu = time.perf_counter(), time.process_time()
    pipe = autosplit(model, devices=4, chunks=8, sample=batch)
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    assert pipe.plan is not None
    return {**seconds, "stages": len(pipe.plan.stages), "status": pipe.plan.status}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=CASES)
    arguments = parser.parse_args(argv)
    if arguments.case:
        print(json.dumps(measure(arguments.case)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.repeats} processes each")
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.split_seconds", "--case", case]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(arguments.repeats)
        ]
        for figure in ("wall_s", "cpu_s"):
            values = [run[figure] for run in runs]
            print(
                f"{case:12} {figure:7} min {min(values):6.2f}  median {statistics.median(values):6.2f}  "
                f"max {max(values):6.2f}"
            )
        print(f"{case:12} {runs[0]['stages']} stages, {runs[0]['status']}")


if __name__ == "__main__":
    main()
