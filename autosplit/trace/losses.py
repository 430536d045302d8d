"""torch's losses as one value per target and a mean or a sum of these."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.nn import functional as F

from autosplit.trace.graph import INFO, Size

_ELEMENTWISE = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.soft_margin_loss,
    F.margin_ranking_loss,
)
_BY_VECTOR = (
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
)
_BY_CLASS = (F.cross_entropy, F.nll_loss)
_ONE = Size(0, 1)
_ALL = (*_ELEMENTWISE, *_BY_VECTOR, *_BY_CLASS)


@dataclass(frozen=True)
class Unreduced:
    """A loss with ``reduction="none"``.

    Attributes:
        function: the loss.
        arguments: all of its arguments by name, ``reduction="none"`` among them.
        reduction: what the model asked for: "mean", "sum" or "batchmean".
        sizes: the sizes of the values before the reduction.
        counted: the mean divides by what the targets count (those that are not ignored, or their class weights).
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    reduction: str
    sizes: tuple[Size, ...]
    counted: bool


def unreduced(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Unreduced | None:
    """Return a loss without its reduction; None for what is no loss of torch's, or one that is not understood."""
    if not any(function is loss for loss in _ALL):
        return None
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    reduction = given["reduction"]
    if reduction not in ("mean", "sum", "batchmean") or not (given.get("size_average") is given.get("reduce") is None):
        return None  # deprecated ways to say it
    if function in (F.mse_loss, F.l1_loss, F.huber_loss) and given.get("weight") is not None:
        return None
    counted = function in _BY_CLASS and not _differentiable(given["target"])
    if counted:
        sizes = _sizes_of(given["target"])
    elif function in _ELEMENTWISE:
        sizes = _broadcast([_sizes_of(v) for k, v in given.items() if k in ("input", "target", "input1", "input2")])
    else:
        sizes = _without(_sizes_of(next(iter(given.values()))), 1 if function in _BY_CLASS else -1)
    if sizes is None or (reduction == "batchmean" and sizes[:1] != (_sizes_of(given["input"]) or ())[:1]):
        return None
    given["reduction"] = "none"
    return Unreduced(function, given, reduction, sizes, counted)


def _sizes_of(value: Any) -> tuple[Size, ...] | None:
    """Return the sizes of an operand that the recording knows; None for a constant or a number."""
    return value.meta[INFO].tensors[0].shape if isinstance(value, fx.Node) and INFO in value.meta else None


def _differentiable(value: Any) -> bool:
    return isinstance(value, fx.Node) and INFO in value.meta and value.meta[INFO].tensors[0].differentiable


def _broadcast(operands: Sequence[tuple[Size, ...] | None]) -> tuple[Size, ...] | None:
    """Return the sizes that operands have together."""
    known = [sizes for sizes in operands if sizes is not None]
    if len(known) < len(operands):
        return None
    columns = itertools.zip_longest(*(reversed(sizes) for sizes in known), fillvalue=_ONE)
    return tuple(next((size for size in column if size != _ONE), _ONE) for column in columns)[::-1]


def _without(sizes: tuple[Size, ...] | None, dim: int) -> tuple[Size, ...] | None:
    """Return the sizes of a matrix (or more) without one dimension."""
    if sizes is None or len(sizes) < 2 or (dim < 0 and len(sizes) > 2):
        return None
    position = dim % len(sizes)
    return (*sizes[:position], *sizes[position + 1 :])
