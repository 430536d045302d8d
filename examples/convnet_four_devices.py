"""The ConvNet of four parts on four devices: trained unsplit, split without microbatches, and pipelined.

The images are handwritten digits in the shape of CIFAR-10. The network ends in a softmax and is trained with the
cross entropy of its probabilities, as its author did. The default precision is double, see
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
from torch import Tensor, nn

from autosplit import autosplit
from examples import comparison, data
from examples.comparison import Devices, Outcome
from examples.models import ConvNet


def accuracy(model: nn.Module, *, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose label the model gives the highest probability."""
    with torch.no_grad():
        probabilities: Tensor = model(images.to(next(model.parameters()).device))
    return float((probabilities.argmax(dim=1).cpu() == labels).float().mean())


def run(*, devices: Devices, chunks: int, steps: int, dtype: torch.dtype) -> Outcome:
    """Train three copies of one network in the three ways and compare their losses and answers."""
    comparison.prepare()
    digits = data.digits(size=32, channels=3).to(dtype)
    model = ConvNet().to(dtype)
    pipe = autosplit(copy.deepcopy(model), devices=devices, chunks=chunks)
    networks: dict[str, nn.Module] = {
        "unsplit": comparison.place(copy.deepcopy(model), devices=devices),
        "split, chunks=1": autosplit(copy.deepcopy(model), devices=devices, chunks=1),
        f"pipelined, chunks={chunks}": pipe,
    }
    losses, figures = {}, {}
    for name, network in networks.items():
        optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
        order = data.batches(digits, rows=64, count=steps)
        losses[name] = comparison.train(network, order, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)
        figures[f"accuracy, {name}"] = accuracy(network, images=digits.inputs, labels=digits.targets)
    unsplit, split, pipelined = networks
    print(pipe.report())
    differences = {
        f"loss, {split}": comparison.loss_difference(losses[unsplit], losses[split]),
        f"loss, {pipelined}": comparison.loss_difference(losses[unsplit], losses[pipelined]),
    }
    assert pipe.plan is not None
    return Outcome(losses, differences, figures | {"stages": float(len(pipe.plan.stages))})


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison from the command line."""
    parser = comparison.parser(__doc__, devices="4", chunks=8, steps=56)
    comparison.add_dtype(parser)
    options = parser.parse_args(argv)
    dtype = getattr(torch, options.dtype)
    outcome = run(devices=options.devices, chunks=options.chunks, steps=options.steps, dtype=dtype)
    comparison.print_losses(outcome.losses)
    for what, figure in outcome.figures.items():
        print(f"  {what}: {figure:.4g}")
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
