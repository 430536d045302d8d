"""Numbers of a recording that depend on sizes of the inputs, as expressions of Python operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROWS = "rows"
"""The name of the number of batch rows among the sizes; lengths are ``dim0``, ``dim1``, ..."""
LEAST = 2
"""The smallest size that a symbol stands for: a size of 1 broadcasts, and Python and torch ask for it all the time."""


@dataclass(frozen=True)
class Symbol:
    """A size of the inputs, by its name."""

    name: str


@dataclass(frozen=True)
class Formula:
    """An ``operator`` function, or one of ``math`` or the builtins, of numbers, symbols and other formulas."""

    function: Callable[..., Any]
    operands: tuple[Formula | Symbol | float, ...]


Number = Formula | Symbol | float


def evaluate(number: Number, sizes: Mapping[str, int]) -> Any:
    """Return the value of a number at given sizes."""
    if isinstance(number, Symbol):
        return sizes[number.name]
    if isinstance(number, Formula):
        return number.function(*(evaluate(operand, sizes) for operand in number.operands))
    return number


def symbols_in(number: Number) -> set[str]:
    """Return the names of the sizes that a number depends on."""
    if isinstance(number, Symbol):
        return {number.name}
    if isinstance(number, Formula):
        return {name for operand in number.operands for name in symbols_in(operand)}
    return set()


@dataclass(frozen=True)
class Length:
    """A dimension of the inputs, other than the batch, that one recording serves at many sizes.

    Attributes:
        name: the symbol's name.
        places: (position among the input tensors, dimension); all have the same size in a call.
    """

    name: str
    places: tuple[tuple[int, int], ...]


def lengths_in(lengths: Sequence[Length], tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the lengths in a call from its input tensors, in the order of the graph's placeholders."""
    found = {}
    for length in lengths:
        position, dim = length.places[0]
        found[length.name] = tensors[position].shape[dim]
    return found
