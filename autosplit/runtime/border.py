"""What one cell keeps from its forward to its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

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
