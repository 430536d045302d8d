"""Hand-written models, each built around one thing at which a front end goes wrong: state, blocks, outputs.

What reads values is in :mod:`benchmarks.zoo.traps_values`, what mixes rows in :mod:`benchmarks.zoo.traps_rows`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.case import Case, Shape
from tests.equivalence.equality import Batch

WIDTH = 16
_BFLOAT16 = 1e-2
"""What bfloat16 keeps: two units of 2**-8; each microbatch's gradient is rounded to it."""


def rows_of_width(shape: Shape) -> Batch:
    """Return a batch of vectors."""
    return Batch((torch.randn(shape.rows, WIDTH),))


def sequences(shape: Shape) -> Batch:
    """Return a batch of sequences of vectors."""
    return Batch((torch.randn(shape.rows, shape.length, WIDTH),))


class Three(nn.Module):
    """Three linear layers for a forward to use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class Clamped(torch.autograd.Function):
    """Clamp forward, pass the gradient straight through backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.7


class CustomFunction(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(Clamped.apply(self.b(torch.relu(self.a(x)))))


class NoGradBlock(Three):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.a(x).sigmoid()
        return self.c(self.b(x) * scale)


class AutocastBlock(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.b(hidden)
        return self.c(hidden.to(x.dtype))


class Checkpointed(Three):
    """A recomputed region with dropout inside; the probability is zero when rows are compared in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: self.dropout(torch.relu(self.b(h))), self.a(x), use_reentrant=False)
        return self.c(hidden)


class Ema(Three):
    """Assigns its buffer anew in every training step; the running value is fed back."""

    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * hidden.detach().mean(0)
        return self.c(torch.relu(self.b(hidden)) + self.ema)


class StepCount(Three):
    """Counts its training steps in a buffer, in place."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.c(self.b(torch.relu(self.a(x)))) * (1 + 0.1 * self.steps)


class NormAct(nn.BatchNorm1d):
    """A batch norm that adds its activation: a subclass with a forward of its own, so no plain leaf."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        normed = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(normed, inplace=True)


class BatchNormAct(Three):
    def __init__(self) -> None:
        super().__init__()
        self.norm = NormAct(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.norm(self.a(x))))


class LayerDrop(nn.Module):
    """Skips layers at random while training, by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and random.random() < 0.3:
                continue
            x = x + torch.tanh(layer(x))
        return x


class TorchLayerDrop(LayerDrop):
    """Skips layers at random while training, by torch's generator, as speech models do."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()).item() < 0.3:
                continue
            x = x + torch.tanh(layer(x))
        return x


class PythonCounter(Three):
    """Counts its calls in a Python attribute and does something else every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.b(torch.relu(self.a(x)))
        return self.c(hidden) if self.calls % 2 else self.c(hidden) * 2


class LazyCache(Three):
    """Builds a table at the first call and keeps it in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1])[:, None]
        return self.c(self.b(torch.relu(self.a(x)) + self.table[: x.shape[1]]))


class ChildNamedGraph(nn.Module):
    """Children with the names of fx's own attributes and of the pipe's."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.code, self.stage0, self.plan = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.plan(self.stage0(torch.relu(self.code(self.graph(x)))))


class InPlaceViews(Three):
    """Writes through views, and reads the base afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        flat = hidden.view(-1)
        flat.mul_(2)
        copied = hidden.clone()
        copied[:, : WIDTH // 2].relu_()
        out = self.b(copied)
        out[:, 0] = 0
        return self.c(out + hidden)


class TiedWeights(nn.Module):
    """An output layer that is the embedding's transpose, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layer(torch.relu(self.layer(self.embedding(tokens))))
        return self.head(self.last(hidden))


class InputInOutput(Three):
    """Returns its input, a constant, and one tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.c(self.b(torch.relu(self.a(x))))
        return x, torch.ones(2), out, out, out.detach()


@dataclass
class Answer:
    """An output that is a dataclass."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str | None = None


class DataclassOutput(Three):
    def forward(self, x: Tensor) -> Answer:
        first = torch.relu(self.a(x))
        second = self.b(first)
        return Answer(self.c(second), (first, second), "three")


class DictOutput(Three):
    def forward(self, x: Tensor) -> dict[str, Any]:
        first = torch.relu(self.a(x))
        return {"logits": self.c(self.b(first)), "hidden": [first], "none": None, "count": 3}


class ScalarsAndNone(Three):
    def forward(
        self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None, *, flag: bool = False, name: str = "a"
    ) -> Tensor:
        hidden = self.b(torch.relu(self.a(x))) * scale
        if bias is not None:
            hidden = hidden + bias
        return self.c(hidden if flag else -hidden) + len(name)


class RandomNoise(Three):
    """Draws numbers while training; nothing in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(torch.relu(self.a(x)))
        if self.training:
            hidden = hidden + torch.randn_like(hidden)
        return self.c(hidden)


class Hooked(Three):
    """A container with a forward hook that changes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.block.register_forward_hook(_double)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.block(self.b(torch.relu(self.a(x)))))


def _double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


class WeightNorm(Three):
    """Parametrised layers: their weights are computed from others at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(self.a)
        self.b = nn.utils.parametrizations.spectral_norm(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x))))


class ComplexNumbers(Three):
    """A spectral layer: complex values in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.a(x), dim=1)
        return self.c(torch.fft.irfft(spectrum * torch.exp(1j * spectrum.real), n=x.shape[1], dim=1) + self.b(x))


class UNet(nn.Module):
    """A down and an up path with long skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.first(x))
        middle = torch.relu(self.middle(torch.relu(self.second(first))))
        return self.last(torch.cat([first, torch.relu(self.up(middle))], 1))


def _tokens(shape: Shape) -> Batch:
    return Batch((torch.randint(0, 32, (shape.rows, shape.length)),))


def _scalars(shape: Shape) -> Batch:
    values = torch.randn(shape.rows, WIDTH)
    if shape.turned:
        return Batch((values, 0.25, torch.ones(WIDTH)), {"flag": False, "name": "ab"})
    return Batch((values, 0.5, None), {"flag": True, "name": "abc"})


def _images(shape: Shape) -> Batch:
    return Batch((torch.randn(shape.rows, 3, 16, 16),))


EVAL = ("eval", "rows")
ALL = ("eval", "train", "rows")
LONG = ("eval", "train", "rows", "length")
TURNED = ("eval", "train", "rows", "values")

_TABLE: tuple[tuple[str, Callable[[], nn.Module], Callable[[Shape], Batch], tuple[str, ...]], ...] = (
    ("autograd_function", CustomFunction, rows_of_width, ALL),
    ("no_grad_block", NoGradBlock, rows_of_width, ALL),
    ("autocast_block", AutocastBlock, rows_of_width, ALL),
    ("checkpoint", Checkpointed, rows_of_width, ALL),
    ("ema_buffer", Ema, rows_of_width, ALL),
    ("step_count", StepCount, rows_of_width, ALL),
    ("batch_norm_act", BatchNormAct, rows_of_width, EVAL),
    ("layer_drop_python", LayerDrop, rows_of_width, EVAL),
    ("layer_drop_torch", TorchLayerDrop, rows_of_width, EVAL),
    ("python_counter", PythonCounter, rows_of_width, ALL),
    ("lazy_cache", LazyCache, sequences, LONG),
    ("child_named_graph", ChildNamedGraph, rows_of_width, ALL),
    ("in_place_views", InPlaceViews, rows_of_width, ALL),
    ("tied_weights", TiedWeights, _tokens, LONG),
    ("dataclass_output", DataclassOutput, rows_of_width, ALL),
    ("input_in_output", InputInOutput, rows_of_width, ALL),
    ("dict_output", DictOutput, rows_of_width, ALL),
    ("scalars_and_none", ScalarsAndNone, _scalars, TURNED),
    ("random_noise", RandomNoise, rows_of_width, EVAL),
    ("hooked_container", Hooked, rows_of_width, ALL),
    ("weight_norm", WeightNorm, rows_of_width, ALL),
    ("complex_numbers", ComplexNumbers, rows_of_width, ALL),
    ("u_net", UNet, _images, ALL),
)


def cases() -> list[Case]:
    """Return the traps of this file."""
    found = [Case(name, "traps", build, inputs, checks, kind="trap") for name, build, inputs, checks in _TABLE]
    return [replace(c, tolerance=_BFLOAT16) if c.name == "autocast_block" else c for c in found]
