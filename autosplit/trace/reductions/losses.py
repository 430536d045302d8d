"""torch's losses: one value per target, and a mean or a sum of these. The one table of them.

ELEMENTWISE    a value per element                 BY_VECTOR    a value per vector, the last dimension
BY_CLASS       a value per target, classes in the second dimension; a mean divides by the targets that count
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from autosplit.trace.graph import Size
from autosplit.trace.recording.recording import by_name

ELEMENTWISE = (
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
BY_VECTOR = (
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
)
BY_CLASS = (F.cross_entropy, F.nll_loss)
_NEW = tuple(getattr(F, name) for name in ("linear_cross_entropy",) if hasattr(F, name))
"""Losses that not every version of torch has."""
_WEIGHTED = (F.mse_loss, F.l1_loss)
"""Their mean divides by the sum of the weights, where there are any."""
_ONES = (1, Size(0, 1))
_OPERANDS = ("input", "input1", "input2", "target")
_IDENTITIES = frozenset(map(id, (*ELEMENTWISE, *BY_VECTOR, *BY_CLASS, *_NEW, F.ctc_loss)))
ShapeOf = Callable[[Any], Sequence[Any] | None]
"""Returns the sizes of an operand; None where they are not known."""


def is_loss(function: Any) -> bool:
    """Tell whether a function is one of torch's losses."""
    return id(function) in _IDENTITIES


@dataclass(frozen=True)
class LossCall:
    """A call of a loss that reduces, its arguments by name and in order."""

    function: Callable[..., Any]
    named: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCall | None:
        """Return a call of a loss; None for any other function, and for a loss that is not reduced."""
        if not is_loss(function):
            return None
        named = by_name(function, args, kwargs)
        if named.get("size_average") is not None or named.get("reduce") is not None:
            return None  # deprecated ways to say it
        own_distance = named.get("distance_function") is not None
        return None if own_distance or named["reduction"] not in ("mean", "sum", "batchmean") else cls(function, named)

    @property
    def reduction(self) -> str:
        """How the values are reduced: "mean", "sum" or "batchmean"."""
        return str(self.named["reduction"])

    @property
    def first(self) -> Any:
        """What is compared with the target."""
        return next(iter(self.named.values()))

    @property
    def weight(self) -> Any:
        """The weights of classes or elements; None where there are none."""
        return self.named.get("weight")

    @property
    def by_class(self) -> bool:
        """Whether the targets are classes, or the probabilities of classes."""
        return self.function in (*BY_CLASS, *_NEW)

    @property
    def elementwise(self) -> bool:
        """Whether there is a value for every element of the operands together."""
        return self.function in ELEMENTWISE

    @property
    def weighted(self) -> bool:
        """Whether the mean divides by the sum of the elements' weights."""
        return self.weight is not None and self.function in _WEIGHTED

    @property
    def in_parts(self) -> bool:
        """Whether ``reduction="none"`` gives values whose mean or sum is the loss, without weights and class counts."""
        return not self.weighted and self.function not in (*_NEW, F.ctc_loss)

    def unreduced(self) -> dict[str, Any]:
        """Return the arguments of the same loss that gives a value per target."""
        return {**self.named, "reduction": "none"}

    def shape(self, shape_of: ShapeOf, *, probabilities: bool) -> tuple[Any, ...] | None:
        """Return the sizes of the values before the reduction; None where they are not known.

        ``probabilities``: the target has one for every class.
        """
        if self.function is F.ctc_loss:
            first = shape_of(self.first)
            return None if first is None else tuple(first[1:2]) if len(first) == 3 else ()
        if self.by_class:
            target = shape_of(self.named["target"])
            classes = min(1, len(target or ()) - 1) if probabilities else None
            return None if target is None else tuple(size for dim, size in enumerate(target) if dim != classes)
        if self.function in BY_VECTOR:
            first = shape_of(self.first)
            return None if first is None else tuple(first[:-1])
        return _broadcast([shape_of(self.named[name]) for name in _OPERANDS if name in self.named])


def class_weights(target: torch.Tensor, ignore_index: int | None, weight: torch.Tensor | None) -> torch.Tensor:
    """Return what each target adds to the divisor of a mean: its class weight, or one; nothing where it is ignored."""
    counts = target != (-100 if ignore_index is None else ignore_index)
    return counts if weight is None else weight.detach()[target.where(counts, 0)].where(counts, 0)


def _broadcast(operands: Sequence[Sequence[Any] | None]) -> tuple[Any, ...] | None:
    """Return the sizes that operands have together; None where those of one are not known."""
    known = [sizes for sizes in operands if sizes is not None]
    if len(known) < len(operands):
        return None
    columns = itertools.zip_longest(*(reversed(sizes) for sizes in known))
    candidates = [[size for size in column if size is not None] for column in columns]
    return tuple(next((size for size in sizes if size not in _ONES), sizes[0]) for sizes in candidates)[::-1]
