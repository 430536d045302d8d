"""A U-Net, whose skips jump over every stage between, on four stages: it finds the ink in noisy digits.

A value that crosses cuts goes straight from its producer to its consumer. Group norm works row by row, so the
pipelined model computes what the plain one computes. The default precision is double, see
``comparison.add_dtype``.
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

from autosplit import Plan, autosplit
from examples import comparison, data
from examples.comparison import Devices, Outcome
from examples.models import UNet


def run(*, devices: Devices, chunks: int, steps: int, rows: int, dtype: torch.dtype) -> Outcome:
    """Train plain and pipelined; compare losses, first gradients and the masks of the trained models."""
    comparison.prepare()
    segments = data.noisy_segments(size=32).to(dtype)
    batches = list(data.batches(segments, rows=rows, count=steps))
    model = UNet().to(dtype)
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    pipe = autosplit(model, devices=devices, chunks=chunks)
    criterion = nn.BCEWithLogitsLoss()
    losses, grads, masks = {}, {}, {}
    for name, network in (("plain", plain), ("pipelined", pipe)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
        first = comparison.train(network, batches[:1], loss_fn=criterion, optimizer=optimizer)
        grads[name] = comparison.gradients(network)
        losses[name] = first + comparison.train(network, batches[1:], loss_fn=criterion, optimizer=optimizer)
        with torch.no_grad():
            logits = network(segments.inputs[:rows].to(next(network.parameters()).device))
        masks[name] = (logits > 0).cpu()
    print(pipe.report())
    differences = {
        "loss": comparison.loss_difference(losses["plain"], losses["pipelined"]),
        "gradients of the first step": comparison.tensor_difference(grads["plain"], grads["pipelined"]),
    }
    assert pipe.plan is not None
    figures = {
        "stages": float(len(pipe.plan.stages)),
        "values that cross several cuts": float(long_skips(pipe.plan)),
    }
    for name, mask in masks.items():
        figures[f"pixels right, {name}"] = float((mask == (segments.targets[:rows] > 0)).float().mean())
    return Outcome(losses, differences, figures)


def long_skips(plan: Plan) -> int:
    """Return how many of the plan's boundaries have a consumer beyond the next stage."""
    return sum(
        boundary.producer >= 0 and max(boundary.consumers) > boundary.producer + 1 for boundary in plan.boundaries
    )


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison from the command line."""
    parser = comparison.parser(__doc__, devices="4", chunks=8, steps=24)
    parser.add_argument("--rows", type=int, default=32, help="images per batch")
    comparison.add_dtype(parser)
    options = parser.parse_args(argv)
    outcome = run(
        devices=options.devices,
        chunks=options.chunks,
        steps=options.steps,
        rows=options.rows,
        dtype=getattr(torch, options.dtype),
    )
    comparison.print_losses(outcome.losses)
    for what, figure in outcome.figures.items():
        print(f"  {what}: {figure:.4g}")
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
