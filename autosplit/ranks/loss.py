"""How the rank of the last stage, which computes the loss, tells the others of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a loss that another rank computes; ``wants`` are the outputs that it uses."""

    wants: frozenset[str] | None
    takes_values = True


class Word(NamedTuple):
    """What the last stage's rank says of a loss.

    Attributes:
        in_cells: whether it adds up by microbatches.
        wants: the outputs that it uses; None: all.
        loss: a number of the loss.
    """

    in_cells: bool
    wants: frozenset[str] | None
    loss: int


class OthersNeeded(Exception):
    """How a loss adds up is asked on outputs that all ranks have to make."""


def ask_others() -> Any:
    """Stand for the whole batch's outputs where they are not there."""
    raise OthersNeeded
