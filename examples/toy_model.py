"""ToyModel, two linear layers meant for two devices: nobody has to write ``.to("cuda:1")`` into the model any more."""

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
from examples import comparison
from examples.comparison import Devices, Outcome
from examples.data import Batch
from examples.models import ToyModel

SHAPES = ((4, 6, 2), (10, 10, 5))
"""Inputs, hidden and outputs of the two versions in circulation."""


def run(*, devices: Devices, chunks: int, steps: int) -> Outcome:
    """Train each version plain and split on the same random data; compare losses and trained parameters."""
    losses: dict[str, tuple[float, ...]] = {}
    differences: dict[str, float] = {}
    for inputs, hidden, outputs in SHAPES:
        comparison.prepare()
        name = f"{inputs}-{hidden}-{outputs}"
        data = [Batch(torch.randn(20, inputs), torch.randn(20, outputs)) for _ in range(steps)]
        model = ToyModel(inputs, hidden, outputs)
        plain = comparison.place(copy.deepcopy(model), devices=devices)
        pipe = autosplit(model, devices=devices, chunks=chunks)
        for kind, network in (("plain", plain), ("split", pipe)):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
            losses[f"{name} {kind}"] = comparison.train(network, data, loss_fn=nn.MSELoss(), optimizer=optimizer)
        differences[f"{name}: loss"] = comparison.loss_difference(losses[f"{name} plain"], losses[f"{name} split"])
        differences[f"{name}: parameters after {steps} steps"] = comparison.tensor_difference(
            comparison.parameters(plain), comparison.parameters(pipe)
        )
        print(pipe.report())
    return Outcome(losses, differences)


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison from the command line."""
    options = comparison.parser(__doc__, devices="2", chunks=4, steps=10).parse_args(argv)
    outcome = run(devices=options.devices, chunks=options.chunks, steps=options.steps)
    for inputs, hidden, outputs in SHAPES:
        name = f"{inputs}-{hidden}-{outputs}"
        comparison.print_losses({f"{name} {kind}": outcome.losses[f"{name} {kind}"] for kind in ("plain", "split")})
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
