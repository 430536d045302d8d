"""ResNet-50 on two stages, with microbatches of 20 images out of a batch of 120.

ResNet-50 has batch norm, which in training normalises over what it is given: here a microbatch, as in every pipeline
that splits a batch. The plain model therefore trains on the same microbatches, one after the other, its gradients
accumulated; that run and the pipelined one must agree. In eval mode nothing depends on the other rows, and the
pipelined model must agree with the plain one on the whole batch.

Batch norm after batch norm over few values multiplies rounding errors with every step, in any two runs that add in
another order. Hence double precision, few steps, images of 64x64 (four values per channel and image in the last layer)
and no momentum.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from autosplit import autosplit
from examples import comparison, data
from examples.comparison import Devices, Outcome
from examples.data import Batch
from examples.models import ResNet

CRITERION = nn.CrossEntropyLoss()


def train_on_microbatches(
    model: nn.Module, batches: Sequence[Batch], *, chunks: int, lr: float, loss_fn: nn.Module = CRITERION
) -> tuple[float, ...]:
    """Train the plain model with every batch cut into ``chunks`` microbatches; return the loss of each batch."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        parts = zip(batch.inputs.tensor_split(chunks), batch.targets.tensor_split(chunks), strict=True)
        for inputs, targets in parts:
            share = len(inputs) / len(batch.inputs)
            loss = loss_fn(model(inputs.to(device)), targets.to(device)) * share
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return tuple(losses)


def run(
    *, devices: Devices, chunks: int, steps: int, width: int, blocks: tuple[int, ...], rows: int, dtype: torch.dtype
) -> Outcome:
    """Train plain and pipelined on equal microbatches, then compare the trained model's answers in eval mode."""
    comparison.prepare()
    digits = data.digits(size=64, channels=3).to(dtype)
    batches = list(data.batches(digits, rows=rows, count=steps))
    model = ResNet(num_classes=10, width=width, blocks=blocks).to(dtype)
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    pipe = autosplit(model, devices=devices, chunks=chunks, batch_norm="micro")
    lr = 0.05
    optimizer = torch.optim.SGD(pipe.parameters(), lr=lr)
    losses = {
        "plain, microbatches": train_on_microbatches(plain, batches, chunks=chunks, lr=lr),
        "pipelined": comparison.train(pipe, batches, loss_fn=CRITERION, optimizer=optimizer),
    }
    plain.load_state_dict(pipe.state_dict())
    plain.eval()
    pipe.eval()
    images = digits.inputs[:rows]
    with torch.no_grad():
        answers = {"logits": plain(images.to(next(plain.parameters()).device))}
        piped = {"logits": pipe(images)}
    print(pipe.report())
    differences = {
        "loss, training": comparison.loss_difference(*losses.values()),
        "logits, eval mode, whole batch": comparison.tensor_difference(answers, piped),
    }
    assert pipe.plan is not None
    return Outcome(losses, differences, {"stages": float(len(pipe.plan.stages))})


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison from the command line."""
    parser = comparison.parser(__doc__, devices="2", chunks=6, steps=3)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer; 64 is ResNet-50's")
    parser.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 6, 3], help="bottlenecks per layer")
    parser.add_argument("--rows", type=int, default=120, help="images per batch")
    comparison.add_dtype(parser)
    options = parser.parse_args(argv)
    outcome = run(
        devices=options.devices,
        chunks=options.chunks,
        steps=options.steps,
        width=options.width,
        blocks=tuple(options.blocks),
        rows=options.rows,
        dtype=getattr(torch, options.dtype),
    )
    comparison.print_losses(outcome.losses)
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
