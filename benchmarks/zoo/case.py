"""One model of the zoo: how it is built, what it is called with, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from tests.equivalence.equality import Batch

ROWS = 7
"""Rows of the first batch: with three chunks 3, 2 and 2."""
OTHER_ROWS = 5
LENGTH = 12
OTHER_LENGTH = 15
BLOCKS = 8
"""With at least so many repeated blocks, no node may hold more than a quarter of the FLOPs."""


@dataclass(frozen=True)
class Shape:
    """The batch that a case is asked for: rows, and the length of sequences where it has any."""

    rows: int = ROWS
    length: int = LENGTH
    turned: bool = False
    """Values at which a model that reads values goes another way."""


@dataclass(frozen=True)
class Case:
    """A model of the zoo.

    Attributes:
        name: unique in the zoo.
        group: "transformers", "timm" or "torchvision".
        build: makes the model, with random weights.
        inputs: makes a batch of some shape from the global generator.
        checks: what is compared with the plain model: "eval", "train", "rows" (another batch size), "length" (another
            sequence length), "values" (values at which the model goes another way).
        blocks: how many repeated blocks the model has.
        ends: names of the modules that are its embeddings and its head.
        kind: what the model is, in a word.
        batch_dims: what autosplit is told about batch dimensions.
        tolerance: the difference that is allowed in float32.
    """

    name: str
    group: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Shape], Batch]
    checks: tuple[str, ...] = ("eval", "train", "rows")
    blocks: int = 0
    ends: Callable[[nn.Module], Sequence[str]] = field(default=lambda model: ())
    kind: str = ""
    batch_dims: Any = None
    tolerance: float = 1e-5

    @property
    def devices(self) -> int:
        """Lanes to split over."""
        return 4 if self.blocks >= BLOCKS else 3


def images(size: int, channels: int = 3) -> Callable[[Shape], Batch]:
    """Return what makes batches of random square images."""
    return lambda shape: Batch((torch.randn(shape.rows, channels, size, size),))


def tokens(shape: Shape, *, vocabulary: int = 96) -> Tensor:
    """Return random token ids; the first few are left to padding and other special tokens."""
    return torch.randint(4, vocabulary, (shape.rows, shape.length))


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability of a model's modules to zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_p", "drop_prob", "layerdrop", "activation_dropout"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)
    return model


def as_double(batch: Batch) -> Batch:
    """Return a batch with its floating tensors, also nested ones, in float64."""

    def double(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    return Batch(pytree.tree_map(double, batch.args), pytree.tree_map(double, batch.kwargs))
