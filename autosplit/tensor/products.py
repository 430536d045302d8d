"""Products of what is gathered for them: ranks keep their parts of it, and gather again for the weights' gradients.

    part ─► all-gather ─► whole ─┬─► whole · Wᵀ ─► ...    forward: the whole goes when the last product is made
      │                          └─► whole · Vᵀ ─► ...
      └─ kept ─► all-gather ─► whole ─► gradients of W, V    backward

Megatron-LM's column products run so under sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from autosplit.tensor.collectives import Move, Placement, Sharing
from autosplit.tensor.ways import COPIED
from autosplit.trace.inputs.objects import storage_key
from autosplit.trace.scope import runs_only


class Again:
    """What products gather in a backward: the first of them for all, until the last has taken it."""

    def __init__(self, move: Move, takers: int) -> None:
        self._move, self._takers, self._left = move, takers, takers
        self._whole: Tensor | None = None

    def weight_gradient(self, came_in: Tensor, local: Tensor) -> Tensor:
        """Return a weight's gradient by that of its product and a rank's part of what was multiplied."""
        whole = self._move.moved(local, self._move.source, COPIED) if self._whole is None else self._whole
        self._left -= 1
        self._whole = whole if self._left else None
        self._left = self._left or self._takers
        return came_in.flatten(0, -2).t() @ whole.flatten(0, -2).to(came_in.dtype)


class GatheredProduct(torch.autograd.Function):
    """A product that keeps a rank's part of what it multiplies.

    ``put_off``: :mod:`autosplit.weight_gradients` makes the weight's gradient after this backward.
    """

    @staticmethod
    def forward(ctx: Any, again: Again, whole: Tensor, local: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the whole."""
        ctx.save_for_backward(local, weight)
        ctx.again, ctx.put_off = again, False
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, came_in: Tensor) -> tuple[Tensor | None, ...]:
        """Gather it again for the weight's gradient."""
        local, weight = ctx.saved_tensors
        _, goes_back, _, trained, biased = ctx.needs_input_grad
        return (
            None,
            came_in @ weight.to(came_in.dtype) if goes_back else None,
            None,
            ctx.again.weight_gradient(came_in, local) if trained and not ctx.put_off else None,
            came_in.flatten(0, -2).sum(0) if biased else None,
        )


class GatheredProducts(Move):
    """Gathers a value whose parts ranks have, and multiplies it as layers like :class:`torch.nn.Linear` do."""

    def __init__(self, source: Placement, sharing: Sharing, layers: Sequence[nn.Module | None]) -> None:
        """``layers``: the modules whose products they are, which may have hooks; None for others."""
        super().__init__(source, COPIED, sharing)
        self._layers = tuple(layers)

    def forward(self, local: Tensor, *state: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the products of a value [..., in] with weights [out, in], each with its bias [out] or None.

        Compiled code decides by itself what it keeps.
        """
        whole, pairs = super().forward(local), [*zip(state[::2], state[1::2], strict=True)]
        if torch.compiler.is_compiling():
            return tuple(F.linear(whole, weight, bias) for weight, bias in pairs)
        again = Again(self, sum(weight.requires_grad for weight, _ in pairs))
        layers = zip(self._layers, pairs, strict=True)
        return tuple(_made(layer, again, whole, local.detach(), *pair) for layer, pair in layers)


def _made(layer: nn.Module | None, again: Again, whole: Tensor, local: Tensor, *state: Any) -> Tensor:
    if layer is None or runs_only(layer, nn.Linear.forward):
        result: Tensor = GatheredProduct.apply(again, whole, local, *state)
    else:
        with _Hooked(again, whole, local):
            result = functional_call(layer, dict(zip(("weight", "bias"), state, strict=True)), (whole,))
    return result


class _Hooked(TorchFunctionMode):
    """Keeps parts of what a layer multiplies between its hooks, unless these have changed it."""

    def __init__(self, again: Again, whole: Tensor, local: Tensor) -> None:
        super().__init__()
        self._again, self._whole, self._local, self._version = again, whole, local, whole._version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and self._multiplied(args[0]):
            return GatheredProduct.apply(self._again, args[0], self._local, *args[1:])
        return func(*args, **(kwargs or {}))

    def _multiplied(self, value: Tensor) -> bool:
        same = storage_key(value) == storage_key(self._whole) and value.shape == self._whole.shape
        return same and self._whole._version == self._version
