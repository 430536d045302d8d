"""What one cell keeps from its forward to its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    read: Sequence[tuple[torch.Tensor, int]] = ()
    """What its backward reads of the model's parameters and buffers, and how often each was changed by then."""
    settled: Sequence[tuple[torch.Tensor, int]] = ()
    """What `again` has to find as it was, likewise: all of them that the stage does not write."""
    again: Callable[[], dict[str, Bundle]] | None = None
    """What runs such a cell as it is, for a backward that cannot be a graph."""
    key: Any = None
    """What its random operations drew by."""
    edges: Sequence[GradientEdge | None] = ()
    """Where gradients of what the graph gave arrive; None for what wants none."""
    rest: Callable[[], None] | None = None
    """What adds the weight gradients that the graph's backward put off."""


def versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return how often each tensor was changed in place; those of inference mode do not count that."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def check_unchanged(before: Iterable[tuple[torch.Tensor, int]], stage: int) -> None:
    """Raise RuntimeError where a parameter or buffer of a stage was changed in place since `versions` saw it."""
    changed = next((tensor for tensor, then in before if tensor._version != then), None)
    if changed is None:
        return
    if changed.requires_grad:
        raise RuntimeError(
            f"a parameter of stage {stage}, of shape {list(changed.shape)}, has been modified by an inplace "
            "operation since the forward: call backward before the optimizer's step, or split with graphs=False"
        )
    raise RuntimeError(
        f"a frozen parameter or buffer of stage {stage}, of shape {list(changed.shape)}, was changed by an "
        "inplace operation since the forward: change it behind the backward, or split with graphs=False"
    )
