"""How long the first call of a pipe takes beyond the step itself, when its plan is given.

    python -m benchmarks.first_call [--tokens 16] [--repeats 3] [--out FILE]

A model of GPT-2-small's shape (12 layers, 768 wide, 50257 tokens, tied head), 32 rows, 4 stages, 32 chunks. Its plan is
made in one process and saved. In others a model of two layers is split first: what a process pays once, mostly for
torch's own modules that are imported when they are needed (``process_s``). Then the model is split by its plan: CPU
seconds of recording and lowering (``prepare_s``), of the first call, and of the calls behind it. CPU seconds, since the
machine may be shared; the difference of two calls is as uncertain as a call, so ``prepare_s`` is the better figure.

    python -m benchmarks.first_call --first-steps [--models gpt t5 vit efficientnet] [--repeats 3] [--out FILE]

What a stranger waits for without a plan, per model, in processes of their own: CPU seconds from
``autosplit(model, devices=4, chunks=8)`` until the first ``train_step`` is done, behind a toy model's, and those of a
later step. A model whose package is not installed is skipped, and the JSON says so; timm needs torchvision, which an
environment with transformers may not have: run the models apart, and ``--out`` keeps those that the file has.
"""

from __future__ import annotations

import argparse
import importlib
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
from torch import nn

from autosplit import Sample, autosplit
from benchmarks import host_nets
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


# -- first steps -------------------------------------------------------------------------------------------------------
def t5() -> tuple[nn.Module, dict[str, Any]]:
    """Return a T5 of six layers with random weights, and its own loss's batch."""
    made: Any = importlib.import_module("transformers")
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 6, "num_heads": 4}
    config = made.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    tokens = torch.randint(1, 128, (16, 8))
    return made.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens.clone()}


def image_model(name: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a model of timm's and images."""
    importlib.import_module("benchmarks.zoo.vision_ops").import_torchvision()
    timm: Any = importlib.import_module("timm")
    return timm.create_model(name, pretrained=False, num_classes=5), torch.randn(16, 3, size, size)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of every position."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt": lambda: (host_nets.GPT(), torch.randint(0, 17, (16, 4))),
    "t5": t5,
    "vit": lambda: image_model("vit_tiny_patch16_224", 224),
    "efficientnet": lambda: image_model("efficientnet_b0", 64),
}


def first_steps(name: str) -> dict[str, float]:
    """Return the CPU seconds of a model's first step, without a plan, and of its third."""
    toy = autosplit(ToyModel(), devices=2, chunks=2)
    toy.train_step(torch.randn(4, 4), target=torch.randn(4, 2), loss_fn=nn.functional.mse_loss)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {"loss_fn": cross_entropy})
    if args:
        kwargs["target"] = torch.randint(0, 5, (len(batch),) if batch.dim() > 2 else batch.shape)
    pipe: Any = None

    def step() -> None:
        nonlocal pipe
        pipe = pipe or autosplit(model, devices=4, chunks=8)
        pipe.train_step(*args, **kwargs)

    first_s, _, step_s = (_cpu_s(step) for _ in range(3))
    return {"first_step_s": first_s, "step_s": step_s}


def all_first_steps(names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return the least of some processes' figures for each model."""
    command = [sys.executable, "-m", "benchmarks.first_call", "--model"]
    found: dict[str, Any] = {}
    for name in names:
        runs = [subprocess.run([*command, name], check=False, capture_output=True, text=True) for _ in range(repeats)]
        if any(run.returncode for run in runs):
            found[name] = {"skipped": runs[0].stderr.strip().splitlines()[-1]}
            continue
        seen = [json.loads(run.stdout) for run in runs]
        found[name] = {key: round(min(each[key] for each in seen), 2) for key in seen[0]}
    return found


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
    parser.add_argument("--first-steps", action="store_true", help="measure first steps without a plan")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--model", choices=MODELS, help="measure one first step; for the processes that this one starts"
    )
    arguments = parser.parse_args(argv)
    if arguments.model is not None:
        print(json.dumps(first_steps(arguments.model)))
        return
    if arguments.first_steps:
        before = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out else {}
        steps = before.get("first_steps", {}) | all_first_steps(arguments.models, arguments.repeats)
        _write(before | {"first_steps": steps}, arguments.out)
        return
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
    _write({**found, "median": medians, "least": least, "repeats": arguments.repeats}, arguments.out)


def _write(found: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(found, indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
