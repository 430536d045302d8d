"""What one cell keeps from its forward to its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from autosplit.runtime.lanes import Bundle
from autosplit.runtime.put_off import Product


@dataclass(slots=True)
class Border:
    """What one cell keeps from its forward to its backward."""

    leaves: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Detached inputs by the name of the bundle that they came in."""
    sent: dict[str, Bundle] = field(default_factory=dict)
    done: Any = None
    """The lane's event behind the forward."""
    gradients: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    """Gradients of what was sent, by target."""
    put_off: list[Product] = field(default_factory=list)
    """What the weight gradients have to make, from the input gradient on."""
    late: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """Leaves and gradients that an input gradient made before its turn: they are added with the weight gradients."""
    lease: Any = None
    """Of a cell that ran as a graph: what holds its slot (:mod:`autosplit.runtime.graphs`)."""
    again: Callable[[], dict[str, Bundle]] | None = None
    """What runs such a cell as it is, for a backward that cannot be a graph."""
    key: Any = None
    """What its random operations drew by."""
    edges: Sequence[GradientEdge | None] = ()
    """Where gradients of what the graph gave arrive; None for what wants none."""
    rest: Callable[[], None] | None = None
    """What adds the weight gradients that the graph's backward put off."""
