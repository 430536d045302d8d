"""How long the first call of a pipe takes beyond the step itself, when its plan is given.

    python -m benchmarks.first_call [--tokens 16] [--repeats 3] [--out FILE]

A model of GPT-2-small's shape (12 layers, 768 wide, 50257 tokens, tied head), 32 rows, 4 stages, 32 chunks. Its plan is
made in one process and saved. In others a model of two layers is split first: what a process pays once, mostly for
torch's own modules that are imported when they are needed (``process_s``). Then the model is split by its plan: CPU
seconds of recording and lowering (``prepare_s``), of the first call, and of the calls behind it. CPU seconds, since the
machine may be shared; the difference of two calls is as uncertain as a call, so ``prepare_s`` is the better figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autosplit import Sample, autosplit
from examples.models import GPT, GPTConfig, ToyModel

ROWS, CHUNKS, STAGES, CALLS = 32, 32, 4, 2


def subject(tokens: int) -> tuple[GPT, torch.Tensor]:
    """Return the model and its batch."""
    torch.manual_seed(0)
    return GPT(GPTConfig.gpt2_small()), torch.randint(0, 50257, (ROWS, tokens))


def save_plan(path: Path, *, tokens: int) -> float:
    """Plan the model, write the plan and return the CPU seconds that a split without one takes."""
    model, batch = subject(tokens)
    pipe: Any = None

    def split() -> None:
        nonlocal pipe
        pipe = autosplit(model, devices=STAGES, chunks=CHUNKS, sample=batch)

    seconds = _cpu_s(split)
    pipe.plan.save(path)
    return seconds


def measure(path: Path, *, tokens: int) -> dict[str, float]:
    """Return the CPU seconds of one split by a plan and of its calls."""
    once_s = _cpu_s(lambda: autosplit(ToyModel(), devices=2, chunks=2, sample=torch.randn(4, 4)))
    model, batch = subject(tokens)
    pipe = autosplit(model, devices=STAGES, plan=path)
    prepare_s = _cpu_s(lambda: pipe.prepare(Sample(batch)))
    first_s = prepare_s + _cpu_s(lambda: pipe(batch))
    step_s = statistics.median(_cpu_s(lambda: pipe(batch)) for _ in range(CALLS))
    times = {"process_s": once_s, "prepare_s": prepare_s, "first_call_s": first_s, "step_s": step_s}
    return {**times, "beyond_step_s": first_s - step_s}


def _cpu_s(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in processes of their own and print, or write, JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", type=Path, help="measure once by this plan; for the processes that this one starts")
    arguments = parser.parse_args(argv)
    if arguments.plan is not None:
        print(json.dumps(measure(arguments.plan, tokens=arguments.tokens)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        split_s = save_plan(path, tokens=arguments.tokens)
        command = [
            sys.executable,
            "-m",
            "benchmarks.first_call",
            "--tokens",
            str(arguments.tokens),
            "--plan",
            str(path),
        ]
        runs = []
        for _ in range(arguments.repeats):
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    least = {name: round(min(run[name] for run in runs), 2) for name in runs[0]}
    load = round(os.getloadavg()[0], 1)
    found = {"torch": torch.__version__, "tokens": arguments.tokens, "load": load, "without_plan_s": round(split_s, 2)}
    text = json.dumps({**found, "median": medians, "least": least, "repeats": arguments.repeats}, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
