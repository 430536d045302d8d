"""A small GPT over bytes whose output layer is its token table, on four stages.

The first and the last stage use the same parameter. It stays one parameter with one gradient, the sum over both uses.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from autosplit import autosplit
from examples import comparison, data
from examples.comparison import Devices, Outcome
from examples.data import Batch
from examples.models import GPT, GPTConfig


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [rows, length, vocab] against targets [rows, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(*, config: GPTConfig, rows: int, steps: int) -> list[Batch]:
    """Return the batches of a run."""
    return list(data.text_batches(data.python_text(), rows=rows, length=config.positions, count=steps))


def run(*, devices: Devices, chunks: int, steps: int, config: GPTConfig, rows: int) -> Outcome:
    """Train one model plain, with the ordinary loop over the pipe, and with ``train_step``; compare all three."""
    comparison.prepare()
    model = GPT(config)
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    stepped = autosplit(copy.deepcopy(model), devices=devices, chunks=chunks)
    pipe = autosplit(model, devices=devices, chunks=chunks)
    text = batches(config=config, rows=rows, steps=steps)
    losses, grads = {}, {}
    for name, network in (("plain", plain), ("pipelined", pipe)):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.001)
        first = comparison.train(network, text[:1], loss_fn=next_byte_loss, optimizer=optimizer)
        grads[name] = comparison.gradients(network)
        losses[name] = first + comparison.train(network, text[1:], loss_fn=next_byte_loss, optimizer=optimizer)
    optimizer = torch.optim.AdamW(stepped.parameters(), lr=0.001)
    curve = []
    for batch in text:
        optimizer.zero_grad()
        curve.append(stepped.train_step(batch.inputs, target=batch.targets, loss_fn=next_byte_loss).item())
        if not curve[1:]:
            grads["train_step"] = comparison.gradients(stepped)
        optimizer.step()
    losses["train_step"] = tuple(curve)
    differences = {}
    for name in ("pipelined", "train_step"):
        table = {"table": grads["plain"]["wte.weight"]}, {"table": grads[name]["wte.weight"]}
        differences[f"{name}: loss"] = comparison.loss_difference(losses["plain"], losses[name])
        differences[f"{name}: gradients of the first step"] = comparison.tensor_difference(grads["plain"], grads[name])
        differences[f"{name}: gradient of the tied table"] = comparison.tensor_difference(*table)
    tied = pipe.get_parameter("wte.weight") is pipe.get_parameter("head.weight")
    print(pipe.report())
    assert pipe.plan is not None
    return Outcome(losses, differences, {"tied": float(tied), "stages": float(len(pipe.plan.stages))})


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison from the command line."""
    parser = comparison.parser(__doc__, devices="4", chunks=8, steps=40)
    parser.add_argument("--rows", type=int, default=16, help="windows of text per batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(argv)
    config = GPTConfig(layers=options.layers, width=options.width)
    outcome = run(devices=options.devices, chunks=options.chunks, steps=options.steps, config=config, rows=options.rows)
    comparison.print_losses(outcome.losses)
    print(f"  wte.weight and head.weight are {'one parameter' if outcome.figures['tied'] else 'TWO parameters'}")
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
