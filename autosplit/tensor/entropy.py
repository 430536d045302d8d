"""Cross entropy over classes of which each rank has a part (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    logits [N, C / p] ─► largest ─── max over ranks ──────────┐
                      ─► sum of exp, logit of the target ─── sum over ranks ─► loss of each target [N], on every rank

Two all-reduces of a few values per target stand in the place of all logits, and the softmax is kept in parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autosplit.tensor.collectives import Move, Sharing
from autosplit.tensor.ways import PARTIAL, REPLICATED
from autosplit.trace.graph import INFO
from autosplit.trace.recording.recording import by_name


@dataclass(frozen=True)
class ClassLoss:
    """A cross entropy that gives a value per target, its classes in the second dimension; see torch's for the rest."""

    logits: fx.Node
    target: fx.Node
    weight: fx.Node | None
    ignore_index: int
    label_smoothing: float


def class_loss_of(node: fx.Node) -> ClassLoss | None:
    """Return what a node compares, or None where it is no cross entropy of classes with a value per target."""
    if node.target is not F.cross_entropy:
        return None
    named = by_name(node.target, node.args, node.kwargs)
    (logits,), (target,) = (named[name].meta[INFO].tensors for name in ("input", "target"))
    if named["reduction"] != "none" or named["reduce"] is not None or named["size_average"] is not None:
        return None
    if target.dtype.is_floating_point or len(logits.shape) < 2:
        return None
    names = ("input", "target", "weight", "ignore_index", "label_smoothing")
    return ClassLoss(*(named[name] for name in names))


class CrossEntropyInParts(nn.Module):
    """The loss of each target, equal to that of ``torch.nn.functional.cross_entropy`` on whole logits."""

    def __init__(self, loss: ClassLoss, classes: int, sharing: Sharing) -> None:
        super().__init__()
        self.ignore_index, self.smoothing = loss.ignore_index, loss.label_smoothing
        self.classes, self.sharing, self.added = classes, sharing, Move(PARTIAL, REPLICATED, sharing)

    def forward(self, logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Take logits [N, C / ranks, ...], targets [N, ...] and weights [C].

        Raises what torch does for a target that is no class and not ignored.
        """
        part, count = logits.float() if logits.itemsize < 4 else logits, logits.shape[1]
        first = self.sharing.rank * count
        counted, index = target != self.ignore_index, target - first
        others = (target >= 0) & (target < self.classes) & ((index < 0) | (index >= count)) | ~counted
        chosen = part.gather(1, index.where(~others, 0).unsqueeze(1)).squeeze(1).where(~others, 0)
        largest = self.sharing.added(part.detach().amax(1), "max")
        sums = [(part - largest.unsqueeze(1)).exp().sum(1), chosen]
        if self.smoothing:
            sums.append(part.sum(1) if weight is None else _product(part, weight.narrow(0, first, count)))
        total, chosen, *every = self.added(torch.stack(sums)).unbind()
        total = total.log() + largest
        loss = total - chosen
        if weight is not None:
            loss = loss * weight[target.where(counted, 0)]
        if self.smoothing:
            smooth = total * (self.classes if weight is None else weight.sum()) - every[0]
            loss = (1 - self.smoothing) * loss + self.smoothing / self.classes * smooth
        return loss.where(counted, 0).to(logits.dtype)


def _product(logits: Tensor, weight: Tensor) -> Tensor:
    shape: Any = (-1, *[1] * (logits.ndim - 2))
    return (logits * weight.view(shape)).sum(1)
