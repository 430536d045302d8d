"""Hand-written models whose Python depends on values or on the number of rows, and values that no row changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Case, Shape
from benchmarks.zoo.traps import ALL, LONG, TURNED, WIDTH, Three, rows_of_width
from tests.equivalence.equality import Batch


class RootValueRead(Three):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.b(torch.relu(self.a(x)))
        if mask.any():
            hidden = hidden.masked_fill(mask[..., None], 0.0)
        return self.c(hidden)


class ReadingBlock(nn.Module):
    """A submodule that looks at its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if torch.isinf(hidden).any() or hidden.abs().max() > 1e4:
            hidden = hidden.clamp(-1e4, 1e4)
        return hidden


class SubmoduleValueRead(Three):
    def __init__(self) -> None:
        super().__init__()
        self.block = ReadingBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.block(self.b(torch.relu(self.a(x)))))


class Recurrence(nn.Module):
    """Iterates a layer until its change is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, steps = self.first(x), 0
        while steps < 8:
            after = torch.tanh(self.layer(hidden)) * 0.5
            steps += 1
            if float((after - hidden).detach().abs().max()) < 0.05:
                break
            hidden = after
        return self.head(hidden)


class RootMeanRead(Three):
    """Asks for the mean of its input; every row is treated by the answer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(torch.relu(self.a(x)))
        return self.c(hidden * 2 if x.mean() > 0 else hidden)


class BufferRead(Three):
    """Goes another way from its second training step on, by a counter in a buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        hidden = self.b(torch.relu(self.a(x)))
        return self.c(hidden * 2 if self.steps >= 2 else hidden)


class BranchOnBatch(nn.Module):
    """A submodule that asks for the mean over its whole batch, which a microbatch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden * 2 if hidden.mean() > 0 else hidden


class SubmoduleBranchOnBatch(Three):
    def __init__(self) -> None:
        super().__init__()
        self.block = BranchOnBatch()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.block(self.b(torch.relu(self.a(x)))))


class ScaleByLargest(nn.Module):
    """A submodule that divides by a Python number: the largest value of its whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden / float(hidden.detach().abs().max())


class SubmoduleScaleByLargest(Three):
    def __init__(self) -> None:
        super().__init__()
        self.block = ScaleByLargest()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.block(self.b(torch.relu(self.a(x)))))


class SquareOfRows(Three):
    """Multiplies by the square of the number of rows, which two sizes do not tell from a line."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x))) * (x.shape[0] ** 2 / 10))


class SharedTuple(Three):
    """Splits a learned table that no row changes, and uses the parts in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        sine, cosine = torch.split(self.table.tanh(), WIDTH)
        hidden = self.b(torch.relu(self.a(x) * sine) + cosine)
        return self.c(hidden * cosine) + sine


class SharedInPlace(Three):
    """Clears a part of a copied parameter in place before it is used, as Swin v2 does with its key bias."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            bias = layer.bias.clone()
            bias[: WIDTH // 2].zero_()
            x = torch.tanh(F.linear(x, layer.weight, bias))
        return x


def with_mask(any_set: bool) -> Callable[[Shape], Batch]:
    """Return what makes sequences and a mask of which some, or no, entries are set."""

    def make(shape: Shape) -> Batch:
        mask = torch.zeros(shape.rows, shape.length, dtype=torch.bool)
        if any_set is not shape.turned:
            mask[shape.rows - 1, 2:] = True
        return Batch((torch.randn(shape.rows, shape.length, WIDTH), mask))

    return make


def _scaled(factor: float) -> Callable[[Shape], Batch]:
    """Return what makes vectors that are so many times as large at the turned values."""
    return lambda shape: Batch((torch.randn(shape.rows, WIDTH) * (factor if shape.turned else 1.0),))


def _signed(shape: Shape) -> Batch:
    return Batch((torch.randn(shape.rows, WIDTH) + (-1.0 if shape.turned else 1.0),))


_TABLE: tuple[tuple[str, Callable[[], nn.Module], Callable[[Shape], Batch], tuple[str, ...]], ...] = (
    ("value_read_root", RootValueRead, with_mask(True), (*LONG, "values")),
    ("value_read_root_unset", RootValueRead, with_mask(False), (*LONG, "values")),
    ("value_read_submodule", SubmoduleValueRead, _scaled(1e6), TURNED),
    ("iterate_until", Recurrence, _scaled(100.0), TURNED),
    ("shared_tuple", SharedTuple, rows_of_width, ALL),
    ("shared_in_place", SharedInPlace, rows_of_width, ALL),
    ("value_read_root_mean", RootMeanRead, _signed, TURNED),
    ("value_read_buffer", BufferRead, rows_of_width, ALL),
    ("submodule_branch_on_batch", SubmoduleBranchOnBatch, rows_of_width, ALL),
    ("submodule_scale_by_largest", SubmoduleScaleByLargest, rows_of_width, ALL),
    ("square_of_rows", SquareOfRows, rows_of_width, ALL),
)


def cases() -> list[Case]:
    """Return the traps of this file."""
    return [Case(name, "traps", build, inputs, checks, kind="trap") for name, build, inputs, checks in _TABLE]
