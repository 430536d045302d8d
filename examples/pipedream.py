"""Asynchronous training (PipeDream) beside synchronous training: accuracy on digits it has not seen, epoch by epoch.

The ConvNet trains on four stages by ``train_step`` and by ``train_stream`` with each staleness: from the same weights,
on the same minibatches in the same order, with the same learning rates. Each run is repeated with other seeds, and
accuracies are means over them. The exit code is 1 when one ends more than 0.5 points below the synchronous one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autosplit import PipelinedModule, autosplit
from examples import comparison, data
from examples.convnet_four_devices import accuracy
from examples.data import Batch
from examples.models import ConvNet

TOLERANCE = 0.5
"""How many points of accuracy asynchronous training may be below synchronous training."""
TRAINED = 1200
"""How many of the 1797 digits are trained on; the others are for the accuracy."""
WAYS = {"synchronous": "=", "stash": "s", "vertical": "v", "2bw": "2"}
"""The ways to train, synchronous and by staleness, with their marks in the curve."""


def train_epoch(pipe: PipelinedModule, epoch: list[Batch], *, way: str, optimizer: Optimizer) -> None:
    """Train on the minibatches of one epoch."""
    loss_fn = nn.CrossEntropyLoss()
    if way == "synchronous":
        for batch in epoch:
            pipe.train_step(batch.inputs, target=batch.targets, loss_fn=loss_fn)
            optimizer.step()
            optimizer.zero_grad()
        return
    minibatches = [(batch.inputs, batch.targets) for batch in epoch]
    for _ in pipe.train_stream(minibatches, loss_fn=loss_fn, optimizer=optimizer, staleness=way):
        pass


def curve(pipe: PipelinedModule, epochs: Sequence[list[Batch]], test: Batch, *, way: str) -> list[float]:
    """Train in one way and return the accuracy after each epoch, in percent; learning rates fall to a twentieth."""
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.001)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=len(epochs))
    accuracies = []
    for epoch in epochs:
        train_epoch(pipe, epoch, way=way, optimizer=optimizer)
        rates.step()
        accuracies.append(100 * accuracy(pipe, images=test.inputs, labels=test.targets))
    return accuracies


def run(*, devices: comparison.Devices, chunks: int, epochs: int, rows: int, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Return the accuracies [seeds, epochs] of each way in percent."""
    comparison.prepare()
    digits, order = data.digits(size=32, channels=3), torch.randperm(1797)
    train, test = (Batch(digits.inputs[part], digits.targets[part]) for part in (order[:TRAINED], order[TRAINED:]))
    count = TRAINED // rows
    accuracies: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in seeds:
        torch.manual_seed(seed)
        model = ConvNet()
        model.out = model.out[0]  # the softmax is the loss's
        begin = {name: value.clone() for name, value in model.state_dict().items()}
        pipe = autosplit(model, devices=devices, chunks=chunks)
        batches = list(data.batches(train, rows=rows, count=count * epochs, seed=seed))
        for way, curves in accuracies.items():
            model.load_state_dict(begin)
            cut = [batches[epoch * count : (epoch + 1) * count] for epoch in range(epochs)]
            curves.append(curve(pipe, cut, test, way=way))
    return {way: torch.tensor(curves) for way, curves in accuracies.items()}


def print_curves(accuracies: Mapping[str, Tensor], *, columns: int = 48) -> None:
    """Print a line per epoch: the mean accuracy of each way as a number and as a mark between the least and 100."""
    means = {way: runs.mean(dim=0) for way, runs in accuracies.items()}
    least = min(float(mean.min()) for mean in means.values())
    legend = "  ".join(f"{mark} {way}" for way, mark in WAYS.items())
    print(f"epoch  {'  '.join(f'{way:>11}' for way in means)}   {least:.0f}% to 100%: {legend}")
    for epoch, row in enumerate(zip(*means.values(), strict=True), 1):
        line = [" "] * columns
        for mean, mark in reversed(list(zip(row, WAYS.values(), strict=True))):
            line[round(float(mean - least) / (100 - least) * (columns - 1))] = mark
        print(f"{epoch:5}  {'  '.join(f'{mean:11.2f}' for mean in row)}   |{''.join(line)}|")


def differences(accuracies: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how many points each staleness is above synchronous training at the end, as a mean over the seeds."""
    ends = {way: float(runs[:, -1].mean()) for way, runs in accuracies.items()}
    return {way: end - ends["synchronous"] for way, end in ends.items() if way != "synchronous"}


def main(argv: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Run the comparison from the command line."""
    parser = comparison.parser(__doc__, devices="4", chunks=4)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rows", type=int, default=40, help="images per minibatch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the weights and the order")
    options = parser.parse_args(argv)
    accuracies = run(**vars(options))
    print_curves(accuracies)
    for way, points in differences(accuracies).items():
        print(f"  {way}: {points:+.2f} points from synchronous training (limit -{TOLERANCE})")
    return accuracies


if __name__ == "__main__":
    sys.exit(min(differences(main()).values()) < -TOLERANCE)
