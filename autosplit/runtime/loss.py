"""How the losses of microbatches add up to the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.errors import InputError

REDUCTIONS = ("auto", "mean", "sum")
_COUNTED = (nn.CrossEntropyLoss, nn.NLLLoss)
_COUNTED_FUNCTIONS = (nn.functional.cross_entropy, nn.functional.nll_loss)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def split_target(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut every tensor of a target into microbatches along its first dimension.

    Raises InputError when a tensor's first dimension is no multiple of the batch.
    """
    rows = sum(sizes)
    leaves, spec = pytree.tree_flatten(target)
    pieces: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            pieces.append([leaf] * len(sizes))
            continue
        factor, rest = divmod(leaf.shape[0], rows)
        if rest or not factor:
            raise InputError(
                f"the target has shape {list(leaf.shape)}, the batch {rows} rows; give one target row per batch row"
            )
        pieces.append(list(leaf.split([size * factor for size in sizes])))
    return (
        [pytree.tree_unflatten(list(parts), spec) for parts in zip(*pieces, strict=True)]
        if pieces
        else [target] * len(sizes)
    )


def call_loss(loss_fn: Callable[..., Any], output: Any, target: Any) -> torch.Tensor:
    """Call the caller's loss; raise InputError when it returns no scalar."""
    loss = loss_fn(output) if target is None else loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(f"loss_fn must return a scalar (0-dim) tensor, it returned {got}; reduce it by mean or sum")
    return loss


def known_reduction(loss_fn: Any, reduction: str) -> str | None:
    """Return "mean", "sum" or "counted" when the loss function says so itself, or None when it must be proved."""
    if reduction not in REDUCTIONS:
        raise InputError(f"loss_reduction={reduction!r} is not available; valid: {', '.join(map(repr, REDUCTIONS))}")
    if reduction != "auto":
        return reduction
    if loss_fn in _COUNTED_FUNCTIONS:
        return "counted"
    own = getattr(loss_fn, "reduction", None)
    if isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == "torch.nn.modules.loss" and own is not None:
        if own == "sum":
            return "sum"
        if own in ("mean", "batchmean"):
            return "counted" if isinstance(loss_fn, _COUNTED) else "mean"
        raise InputError(
            f"{type(loss_fn).__name__}(reduction={own!r}) returns no scalar; use reduction='mean' or 'sum'"
        )
    return None


def weights(kind: str, loss_fn: Any, sizes: Sequence[int], targets: Sequence[Any]) -> list[Any]:
    """Return the factor of each microbatch's loss: 1 for sums, the share of rows or of valid targets for means."""
    if kind == "sum":
        return [1.0] * len(sizes)
    rows = sum(sizes)
    if kind == "mean":
        return [size / rows for size in sizes]
    counts = [_valid(loss_fn, target) for target in targets]
    total = sum(counts[1:], counts[0])
    return [torch.where(total > 0, count / total, count) for count in counts]


def _valid(loss_fn: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of the class weights of the targets that count."""
    class_weights = getattr(loss_fn, "weight", None)
    if target.is_floating_point():
        return torch.tensor(float(target[..., 0].numel() if target.dim() == 2 else target.numel() / target.shape[1]))
    counted = target != getattr(loss_fn, "ignore_index", -100)
    if class_weights is None:
        return counted.sum().to(torch.float64)
    return class_weights[target.where(counted, 0)].where(counted, 0).sum().to(torch.float64)


def prove(
    loss_fn: Any, output: Callable[[int | None], Any], target: Any, targets: Sequence[Any], sizes: Sequence[int]
) -> str:
    """Find out on one batch whether a loss is a mean or a sum over rows.

    ``output(m)`` returns the model's output for microbatch ``m``, or for the whole batch when ``m`` is None. Raises
    InputError when the loss is neither.
    """
    with torch.no_grad():
        whole = call_loss(loss_fn, output(None), target)
        parts = [call_loss(loss_fn, output(m), part) for m, part in enumerate(targets)]
    rows = sum(sizes)
    mean = sum(float(part) * size / rows for part, size in zip(parts, sizes, strict=True))
    total = sum(float(part) for part in parts)
    bound = _TOLERANCE.get(whole.dtype, 1e-2)
    for kind, value in (("mean", mean), ("sum", total)):
        if abs(value - float(whole)) <= bound * max(abs(float(whole)), 1e-30):
            return kind
    raise InputError(
        f"the loss is neither a mean nor a sum over rows: {float(whole):.6g} on the whole batch, {mean:.6g} as the mean and "
        f"{total:.6g} as the sum over {len(sizes)} microbatches; pass loss_reduction='mean' or 'sum' if that is what you "
        "want, or call pipe(x) and loss.backward(), which computes it on the whole batch"
    )
