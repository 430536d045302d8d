"""Untouched models on four lanes: the same training, the same losses, in a few seconds on two cores.

Each model trains twice with the same loop, once as it is and once through ``autosplit(model, devices=4, chunks=8)``.
The exit code is 1 when a loss differs by more than 1e-5 of its value. The ConvNet trains in double precision, the GPT
in float32; ``comparison.add_dtype`` says why.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from autosplit import autosplit
from examples import comparison, data
from examples.comparison import Devices, LossFunction, Outcome
from examples.data import Batch
from examples.gpt_tied import next_byte_loss
from examples.models import GPT, ConvNet, GPTConfig


def compare(
    model: nn.Module, batches: list[Batch], *, loss_fn: LossFunction, devices: Devices, chunks: int
) -> dict[str, tuple[float, ...]]:
    """Train a copy plain and the model pipelined, print the partition, and return both loss curves."""
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    pipe = autosplit(model, devices=devices, chunks=chunks)
    losses, seconds = {}, {}
    for name, network in (("plain", plain), ("pipelined", pipe)):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.001)
        start = time.perf_counter()
        losses[name] = comparison.train(network, batches, loss_fn=loss_fn, optimizer=optimizer)
        seconds[name] = time.perf_counter() - start
    print(pipe.report())
    print()
    comparison.print_losses(losses)
    print(f"  {len(batches)} steps took {seconds['plain']:.1f} s plain, {seconds['pipelined']:.1f} s pipelined")
    print("  (the latter with tracing, profiling and planning in its first step)")
    return losses


def run(*, devices: Devices, chunks: int, steps: int, rows: int) -> Outcome:
    """Train the ConvNet on digits and the tied GPT on text, both plain and pipelined."""
    losses: dict[str, tuple[float, ...]] = {}
    differences: dict[str, float] = {}
    config = GPTConfig()
    digits = list(data.batches(data.digits(size=32, channels=3).to(torch.float64), rows=rows, count=steps))
    text = list(data.text_batches(data.python_text(), rows=rows // 4, length=config.positions, count=steps))
    comparison.prepare()
    workloads = (
        ("ConvNet on handwritten digits", ConvNet().double(), digits, nn.CrossEntropyLoss()),
        ("GPT with tied table and head on Python's own sources", GPT(config), text, next_byte_loss),
    )
    for title, model, batches, loss_fn in workloads:
        print(f"\n{title}\n{'-' * len(title)}")
        curves = compare(model, batches, loss_fn=loss_fn, devices=devices, chunks=chunks)
        kind = type(model).__name__
        losses |= {f"{kind}, {name}": curve for name, curve in curves.items()}
        differences[f"{kind}: loss over {steps} steps"] = comparison.loss_difference(*curves.values())
    return Outcome(losses, differences)


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the demonstration from the command line."""
    parser = comparison.parser(__doc__, devices="4", chunks=8, steps=56)
    parser.add_argument("--rows", type=int, default=64, help="images per batch; a quarter as many windows of text")
    options = parser.parse_args(argv)
    outcome = run(devices=options.devices, chunks=options.chunks, steps=options.steps, rows=options.rows)
    print()
    comparison.print_verdict(outcome)
    if outcome.equal:
        print("Both models train pipelined exactly as they train plain.")
    else:
        print("The pipelined training DIFFERS from the plain one.")
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
