"""The blocks on which tensor and data parallelism are usually explained, here on two stages each.

A two-matrix MLP, self-attention without heads or softmax, the one linear layer of the data-parallel demonstration
(it has a single operation, so it gets one stage and a warning), and a small network trained for a hundred steps.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import autosplit
from examples import comparison
from examples.comparison import Devices, Outcome
from examples.data import Batch


class MLP(nn.Module):
    """Two matrix products, the first of which Megatron splits by columns and the second by rows."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(inputs, hidden))
        self.w2 = nn.Parameter(torch.randn(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, inputs] to [rows, outputs]."""
        return torch.matmul(torch.matmul(x, self.w1), self.w2)


class SelfAttention(nn.Module):
    """Self-attention reduced to its matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Parameter(torch.randn(width, width)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, length, width] to the same shape."""
        query = F.linear(x, self.w_q)
        key = F.linear(x, self.w_k)
        value = F.linear(x, self.w_v)
        scores = torch.matmul(query, key.permute(0, 2, 1))
        return F.linear(torch.matmul(scores, value), self.w_o)


class Model(nn.Module):
    """One linear layer, the whole model of the data-parallel demonstration."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, inputs] to [rows, outputs]."""
        return self.fc(x)


class Net(nn.Module):
    """Two linear layers, 10 to 100 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 100)
        self.fc2 = nn.Linear(100, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, 10] to [rows, 1]."""
        return self.fc2(self.fc1(x))


def compare_block(model: nn.Module, x: Tensor, *, devices: Devices, chunks: int) -> dict[str, float]:
    """Run a block forward and backward, plain and pipelined, and return the differences."""
    name = type(model).__name__
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    pipe = autosplit(model, devices=devices, chunks=chunks)
    expected = plain(x.to(next(plain.parameters()).device))
    expected.mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = pipe(x)
    outputs.mean().backward()
    assert pipe.plan is not None
    print(f"{name}: {len(pipe.plan.stages)} stages")
    for warning in caught:
        print(f"  warning: {warning.message}")
    return {
        f"{name}: outputs": comparison.tensor_difference({"outputs": expected}, {"outputs": outputs}),
        f"{name}: gradients": comparison.tensor_difference(comparison.gradients(plain), comparison.gradients(pipe)),
    }


def train_net(*, devices: Devices, chunks: int, steps: int) -> dict[str, tuple[float, ...]]:
    """Train Net on random data, plain and pipelined, and return both loss curves."""
    model = Net()
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    pipe = autosplit(model, devices=devices, chunks=chunks)
    batches = [Batch(torch.randn(64, 10), torch.randn(64, 1)) for _ in range(steps)]
    losses = {}
    for name, network in (("Net, plain", plain), ("Net, pipelined", pipe)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        losses[name] = comparison.train(network, batches, loss_fn=nn.MSELoss(), optimizer=optimizer)
    return losses


def run(*, devices: Devices, chunks: int, steps: int) -> Outcome:
    """Compare the three blocks and the small network."""
    comparison.prepare()
    differences = compare_block(MLP(4, 16, 8), torch.randn(2, 4), devices=devices, chunks=2)
    differences |= compare_block(SelfAttention(24), torch.randn(2, 16, 24), devices=devices, chunks=2)
    differences |= compare_block(Model(5, 2), torch.randn(30, 5), devices=devices, chunks=2)
    losses = train_net(devices=devices, chunks=chunks, steps=steps)
    return Outcome(losses, differences | {"Net: loss": comparison.loss_difference(*losses.values())})


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison from the command line."""
    options = comparison.parser(__doc__, devices="2", chunks=8, steps=100).parse_args(argv)
    outcome = run(devices=options.devices, chunks=options.chunks, steps=options.steps)
    comparison.print_losses(outcome.losses)
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
