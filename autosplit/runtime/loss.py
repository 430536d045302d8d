"""How the losses of microbatches add up to the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.errors import InputError
from autosplit.runtime.ops import rows_along
from autosplit.trace.graph import TracedGraph

REDUCTIONS = ("auto", "mean", "sum")
_COUNTED = (nn.CrossEntropyLoss, nn.NLLLoss)
_COUNTED_FUNCTIONS = (nn.functional.cross_entropy, nn.functional.nll_loss)
_KEPT_BYTES = 1 << 26
_WAY_OUT = (
    "pass loss_reduction='mean' or 'sum' if that is what you want, or call pipe(x) and loss.backward(), which computes "
    "it on the whole batch"
)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


@dataclass(frozen=True)
class Proof:
    """What one batch says about a loss; not conclusive when a mean and a sum would both explain it."""

    kind: str
    conclusive: bool


def split_target(
    target: Any, sizes: Sequence[int], *, batch_dims: Mapping[tuple[int, ...], int] | None = None
) -> list[Any]:
    """Cut every tensor of a target into microbatches: along the first dimension, or as an output of equal shape.

    Raises InputError when a tensor's batch dimension is no multiple of the batch.
    """
    rows = sum(sizes)
    leaves, spec = pytree.tree_flatten(target)
    pieces: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            pieces.append([leaf] * len(sizes))
            continue
        dim = (batch_dims or {}).get(tuple(leaf.shape), 0)
        if leaf.shape[dim] % rows or not leaf.shape[dim]:
            raise InputError(
                f"the target has shape {list(leaf.shape)}, the batch {rows} rows; give one target row per batch row"
            )
        pieces.append(list(rows_along(leaf, sizes, dim)))
    if not pieces:
        return [target] * len(sizes)
    return [pytree.tree_unflatten(list(parts), spec) for parts in zip(*pieces, strict=True)]


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
    function, options = _unwrapped(loss_fn)
    if any(function is counted for counted in _COUNTED_FUNCTIONS):
        return {"mean": "counted", "sum": "sum"}.get(options.get("reduction", "mean"))
    own = getattr(loss_fn, "reduction", None)
    if isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == "torch.nn.modules.loss" and own is not None:
        if own == "sum":
            return "sum"
        if own in ("mean", "batchmean"):
            return "counted" if type(loss_fn) in _COUNTED else "mean"
        raise InputError(
            f"{type(loss_fn).__name__}(reduction={own!r}) returns no scalar; use reduction='mean' or 'sum'"
        )
    return None


def per_microbatch(
    kind: str, loss_fn: Callable[..., Any], sizes: Sequence[int], targets: Sequence[Any]
) -> Callable[[Any, int], torch.Tensor]:
    """Return ``f(output, m)``: what microbatch ``m`` adds to the loss of the batch.

    A mean over rows counts by rows; torch's cross entropy and NLL count by the weights of the targets that are not
    ignored, so they are summed per microbatch and divided by the whole batch's count.
    """
    if kind == "counted":
        summed, total = _summed(loss_fn), sum(_counted(loss_fn, target) for target in targets)
        return lambda output, m: summed(output, targets[m]) / total
    rows = sum(sizes)
    shares = [1.0 if kind == "sum" else size / rows for size in sizes]
    return lambda output, m: call_loss(loss_fn, output, targets[m]) * shares[m]


def _unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function under a ``functools.partial`` of keywords, and the keywords."""
    if isinstance(loss_fn, partial) and not loss_fn.args:
        return loss_fn.func, loss_fn.keywords
    return loss_fn, {}


def _summed(loss_fn: Any) -> Callable[..., torch.Tensor]:
    """Return the same loss as a sum."""
    function, given = _unwrapped(loss_fn)
    if any(function is counted for counted in _COUNTED_FUNCTIONS):
        return partial(function, **{**given, "reduction": "sum"})
    options = {"weight": loss_fn.weight, "ignore_index": loss_fn.ignore_index, "reduction": "sum"}
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        return partial(nn.functional.cross_entropy, label_smoothing=loss_fn.label_smoothing, **options)
    return partial(nn.functional.nll_loss, **options)


def _counted(loss_fn: Any, target: torch.Tensor) -> Any:
    """Return what torch's mean divides by: the class weights of the targets that count, or their number."""
    if target.is_floating_point():
        return target.numel() / target.shape[1 if target.dim() > 1 else 0]
    given = _unwrapped(loss_fn)[1]
    class_weights = given.get("weight", getattr(loss_fn, "weight", None))
    counts = target != given.get("ignore_index", getattr(loss_fn, "ignore_index", -100))
    if class_weights is None:
        return counts.sum()
    return class_weights[target.where(counts, 0)].where(counts, 0).sum()


def prove(
    loss_fn: Any, output: Callable[[int | None], Any], target: Any, targets: Sequence[Any], sizes: Sequence[int]
) -> Proof:
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
    agree = [kind for kind, value in (("mean", mean), ("sum", total)) if _close(value, whole)]
    if agree:
        return Proof(agree[0], conclusive=len(agree) == 1)
    raise InputError(
        f"the loss is neither a mean nor a sum over rows: {float(whole):.6g} on the whole batch, {mean:.6g} as the "
        f"mean and {total:.6g} as the sum over {len(sizes)} microbatches; {_WAY_OUT}"
    )


class WholeCheck:
    """Holds a proved loss against the whole batch in every step, where the outputs are small enough to be kept."""

    def __init__(self, loss_fn: Any, target: Any, kind: str) -> None:
        self.loss_fn, self.target, self.kind = loss_fn, target, kind
        self.kept: list[list[Any]] | None = []
        self.bytes = 0

    def keep(self, flat: Sequence[Any]) -> None:
        """Keep the flat outputs of one microbatch, unless all together are too large."""
        if self.kept is None:
            return
        self.bytes += sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
        if self.bytes > _KEPT_BYTES:
            self.kept = None
        else:
            self.kept.append([t.detach() if isinstance(t, torch.Tensor) else t for t in flat])

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept."""
        return [leaf for flat in self.kept or () for leaf in flat if isinstance(leaf, torch.Tensor)]

    def compare(self, total: torch.Tensor, traced: TracedGraph) -> None:
        """Raise InputError when the loss of the whole batch is not what the microbatches add up to."""
        if self.kept is None:
            return
        flat = [
            torch.cat(parts, dim) if dim is not None else parts[0]
            for parts, dim in zip(zip(*self.kept, strict=True), traced.batch_outputs, strict=True)
        ]
        with torch.no_grad():
            whole = call_loss(self.loss_fn, traced.unflatten(flat), self.target)
        if not _close(float(total), whole) and not (torch.isnan(whole) and torch.isnan(total)):
            raise InputError(
                f"the loss was a {self.kind} over rows on the first batch and is none on this one: {float(whole):.6g} "
                f"on the whole batch, {float(total):.6g} from its microbatches; no gradient was added; {_WAY_OUT}"
            )


def _close(value: float, whole: torch.Tensor) -> bool:
    bound = _TOLERANCE.get(whole.dtype, 1e-2)
    return abs(value - float(whole)) <= bound * max(abs(float(whole)), 1e-30)
