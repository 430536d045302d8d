"""Hand-written models, each built around one thing at which a front end goes wrong: state, blocks, outputs.

What reads values is in :mod:`benchmarks.zoo.traps_values`, what mixes rows in :mod:`benchmarks.zoo.traps_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

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


class AutocastBlock(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.b(hidden)
        return self.c(hidden.to(x.dtype))


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


class ScalarsAndNone(Three):
    def forward(
        self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None, *, flag: bool = False, name: str = "a"
    ) -> Tensor:
        hidden = self.b(torch.relu(self.a(x))) * scale
        if bias is not None:
            hidden = hidden + bias
        return self.c(hidden if flag else -hidden) + len(name)


def _tokens(shape: Shape) -> Batch:
    return Batch((torch.randint(0, 32, (shape.rows, shape.length)),))


def _scalars(shape: Shape) -> Batch:
    values = torch.randn(shape.rows, WIDTH)
    if shape.turned:
        return Batch((values, 0.25, torch.ones(WIDTH)), {"flag": False, "name": "ab"})
    return Batch((values, 0.5, None), {"flag": True, "name": "abc"})


EVAL = ("eval", "rows")
ALL = ("eval", "train", "rows")
LONG = ("eval", "train", "rows", "length")
TURNED = ("eval", "train", "rows", "values")

_TABLE: tuple[tuple[str, Callable[[], nn.Module], Callable[[Shape], Batch], tuple[str, ...]], ...] = (
    ("autocast_block", AutocastBlock, rows_of_width, ALL),
    ("step_count", StepCount, rows_of_width, ALL),
    ("in_place_views", InPlaceViews, rows_of_width, ALL),
    ("tied_weights", TiedWeights, _tokens, LONG),
    ("dataclass_output", DataclassOutput, rows_of_width, ALL),
    ("scalars_and_none", ScalarsAndNone, _scalars, TURNED),
)


def cases() -> list[Case]:
    """Return the traps of this file."""
    found = [Case(name, "traps", build, inputs, checks, kind="trap") for name, build, inputs, checks in _TABLE]
    return [replace(c, tolerance=_BFLOAT16) if c.name == "autocast_block" else c for c in found]
