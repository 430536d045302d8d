"""Train the same model plain and pipelined, and print both loss curves side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from examples.data import Batch

TOLERANCE = 1e-5
"""Largest relative difference that float32 sums in another order may show here."""

Devices = int | list[str]
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    """What an example found: loss curves by name, relative differences by what was compared, other figures."""

    losses: Mapping[str, tuple[float, ...]]
    differences: Mapping[str, float]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether every difference is within TOLERANCE."""
        return all(difference <= TOLERANCE for difference in self.differences.values())

    @property
    def exit_code(self) -> int:
        """0 when everything agrees, 1 otherwise."""
        return 0 if self.equal else 1


def parser(description: str | None, *, devices: str, chunks: int, steps: int = 0) -> argparse.ArgumentParser:
    """Return a command line with the options that the examples share; ``--steps`` only where ``steps`` is given."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--devices", type=parse_devices, default=parse_devices(devices), help='a number, or names: "cuda:0,cuda:1"'
    )
    made.add_argument("--chunks", type=int, default=chunks, help="microbatches per batch")
    if steps:
        made.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    return made


def add_dtype(made: argparse.ArgumentParser) -> None:
    """Add the option of a precision, double where not said otherwise.

    ReLU and max pooling are switches: a rounding of float32 that flips one shows in the losses some steps later, in any
    two runs that add in another order. In one of six seeds the plain ConvNet, its batch cut in eight by hand, is off by
    more than the tolerance after 56 steps. In double precision such a flip is too rare to meet.
    """
    made.add_argument("--dtype", choices=("float32", "float64"), default="float64", help="precision of the training")


def parse_devices(text: str) -> Devices:
    """Return a number of devices, or a list of device names separated by commas."""
    return int(text) if text.isdecimal() else text.split(",")


def prepare(seed: int = 0) -> None:
    """Seed torch and make two runs comparable: one thread, as a CPU lane has; on GPUs full float32, no TF32."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")


def place(model: nn.Module, *, devices: Devices) -> nn.Module:
    """Put the plain model on the first of the devices and return it."""
    return model if isinstance(devices, int) else model.to(devices[0])


def train(model: nn.Module, data: Iterable[Batch], *, loss_fn: LossFunction, optimizer: Optimizer) -> tuple[float, ...]:
    """Run the ordinary training loop, the same for a plain and a pipelined model, and return the losses."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        outputs = model(batch.inputs.to(_device(model)))
        loss = loss_fn(outputs, batch.targets.to(outputs.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses)


def loss_difference(reference: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the largest relative difference of two loss curves."""
    first, second = (torch.tensor(curve, dtype=torch.float64) for curve in (reference, other))
    return float(((first - second).abs() / first.abs()).max())


def tensor_difference(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two sets of tensors, relative to the largest element of each tensor."""
    assert reference.keys() == other.keys()
    worst = torch.zeros((), dtype=torch.float64)
    for name, first in reference.items():
        first, second = first.detach().double().cpu(), other[name].detach().double().cpu()
        scale = first.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        worst = torch.maximum(worst, (first - second).abs().max() / scale)
    return float(worst)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient by parameter name; a parameter without one raises KeyError."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise KeyError(f"{name} has no gradient")
        found[name] = parameter.grad.detach().clone()
    return found


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by name."""
    return dict(model.named_parameters())


def print_losses(losses: Mapping[str, tuple[float, ...]], *, rows: int = 12) -> None:
    """Print loss curves side by side, at most about ``rows`` evenly spaced steps, with the spread at each."""
    names = list(losses)
    print("  step  " + "  ".join(f"{name:>20}" for name in names) + f"  {'difference':>10}")
    steps = len(losses[names[0]])
    stride = max(1, steps // rows)
    for step in sorted({*range(0, steps, stride), steps - 1}):
        values = [losses[name][step] for name in names]
        print(f"  {step + 1:4d}  " + "  ".join(f"{v:20.7f}" for v in values) + f"  {max(values) - min(values):10.1e}")


def print_verdict(outcome: Outcome) -> None:
    """Print each difference beside the tolerance, and what follows from them."""
    print(f"Largest relative differences (limit {TOLERANCE:.0e}):")
    for what, difference in outcome.differences.items():
        print(f"  {what:<58} {difference:8.1e}  {'equal' if difference <= TOLERANCE else 'DIFFERENT'}")


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
