"""Is a loss a mean or a sum over rows? Asked on the first batch, and held against the whole batch in every step.

A loss must do nothing but return a value: it is called several times in a step.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.backward import gradients
from autosplit.compare import ROUNDING, difference
from autosplit.errors import InputError
from autosplit.runtime.loss.outputs import Outputs, Placeholder, joined, with_placeholders
from autosplit.runtime.loss.parts import WAY_OUT, Count, Counted, Parts, adds_up, call_loss
from autosplit.trace.borrowed import state
from autosplit.trace.graph import TracedGraph
from autosplit.trace.inputs.python_state import OutsideValues

_TINY = 1e-30
WRITES = "writes"
"""The kind of a loss that changes its target or the output in place: it runs once, on the whole batch."""
_KEPT = 32
_KEPT_BYTES = 1 << 26
_ROUGHEST = 1e-2
"""A loss is one number: however coarse its dtype, a larger difference has another cause than rounding."""
_WORDS = {
    "mean": "mean over rows",
    "sum": "sum over rows",
    "counted": "mean over rows with torch's losses in it",
    "counted sum": "sum over rows with torch's losses in it",
}


class Proofs:
    """What was found out about losses, by what the loss is and what was asked; the last few answers are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._values = {integers: OutsideValues(loose=True, integers=integers) for integers in (False, True)}

    def identity(self, loss_fn: Any, *, integers: bool = False) -> Any:
        """Return what a loss is: one that a loop makes anew in every round is the same one.

        Numbers and tensors that it holds may be others in the next round, what else it holds may not; with ``integers``
        whole numbers may not either.
        """
        return self._values[integers].signature((loss_fn,))

    def find(self, loss_fn: Any, question: Any) -> Any:
        """Return the answer, or None if it is not known yet."""
        return self._kept.get((self.identity(loss_fn), question))

    def keep(self, loss_fn: Any, question: Any, answer: Any) -> Any:
        """Keep an answer and return it."""
        self._kept[self.identity(loss_fn), question] = answer
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return answer


def prove(
    loss_fn: Callable[..., Any],
    output: Callable[[int | None], Any],
    target: Any,
    targets: Sequence[Any],
    sizes: Sequence[int],
    leaves: Sequence[torch.Tensor],
) -> list[str] | None:
    """Find out on one batch how the losses of microbatches add up; None when this batch does not tell.

    Returns the kinds that explain the loss of the batch, the most exact first; or `WRITES` alone.

    ``output(m)`` returns the model's output for microbatch ``m``, or for the whole batch when ``m`` is None; ``leaves``
    are the tensors of the whole output, and parameters of the loss, whose gradients count. Raises InputError when the
    loss or its gradient is neither a mean nor a sum, or when the loss draws random numbers or changes its own buffers.
    """
    with torch.no_grad():
        tensors = [leaf for leaf in pytree.tree_leaves((output(None), target)) if isinstance(leaf, torch.Tensor)]
        versions = [leaf._version for leaf in tensors if not leaf.is_inference()]
        with _pure(loss_fn), state.contents(tensors):
            whole, counted = _whole(loss_fn, output(None), target)
            writes = versions != [leaf._version for leaf in tensors if not leaf.is_inference()]
        if writes:
            return [WRITES]
        outputs = [output(m) for m in range(len(sizes))]
        sums = {
            kind: _parts(Parts(kind, loss_fn, sizes, targets, counted if "counted" in kind else ()), outputs)
            for kind in ("mean", "sum", *(("counted", "counted sum") if counted else ()))
        }
    if not math.isfinite(whole):
        return None
    agree = [kind for kind, values in sums.items() if values is not None and _close(values, float(whole), whole.dtype)]
    if not agree:
        mean, total = (math.fsum(sums[kind] or [math.nan]) for kind in ("mean", "sum"))
        raise InputError(
            f"the loss is neither a mean nor a sum over rows: {float(whole):.6g} on the whole batch, {mean:.6g} as the "
            f"mean and {total:.6g} as the sum over {len(sizes)} microbatches; {WAY_OUT}"
        )
    if {"mean", "sum"} <= set(agree):
        return None
    best = [kind for kind in ("counted", "counted sum", "mean", "sum") if kind in agree]
    if leaves:
        parts = Parts(best[0], loss_fn, sizes, targets, counted if "counted" in best[0] else ())
        _check_gradients(parts, output, target, leaves)
    return best


def _check_gradients(
    parts: Parts, output: Callable[[int | None], Any], target: Any, leaves: Sequence[torch.Tensor]
) -> None:
    """Raise InputError when the gradients of the microbatches' losses are not those of the whole batch's loss.

    A loss that is divided by a detached part of itself, or that changes gradients by a hook, has the value of a mean
    and the gradient of none.
    """
    with torch.inference_mode(False), torch.enable_grad():
        whole = _gradients(call_loss(parts.loss_fn, output(None), target), leaves)
        added = [_gradients(parts(output(m), m), leaves) for m in range(len(parts.sizes))]
    for gradient, *of_parts in zip(whole, *added, strict=True):
        largest = gradient.abs().max().item() if gradient.numel() else 0.0
        if not math.isfinite(largest):
            continue
        apart = difference(torch.stack(of_parts).sum(0, dtype=gradient.dtype), gradient, floor=_TINY).share
        if apart > 10 * _tolerance(gradient.dtype):
            raise InputError(
                f"the loss has the value of a {_WORDS[parts.kind]}, its gradient is none: it is up to {largest:.3g} on "
                f"the whole batch, and off by {apart * largest:.3g} from {len(parts.sizes)} microbatches; "
                f"{WAY_OUT}"
            )


def _gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = gradients([loss], [torch.ones_like(loss)], leaves, keep=False)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]


def _whole(loss_fn: Callable[..., Any], output: Any, target: Any) -> tuple[torch.Tensor, tuple[Counted, ...]]:
    if any(hasattr(loss_fn, name) for name in ("_torchdynamo_orig_callable", "_orig_mod")):
        return call_loss(loss_fn, output, target), ()  # compiled code calls nothing that a mode sees
    with Count() as mode:
        whole = call_loss(loss_fn, output, target)
    return whole, tuple(mode.counted)


def _parts(parts: Parts, outputs: Sequence[Any]) -> list[float] | None:
    """Return what each microbatch would add; None when its losses are not parts of the whole batch's."""
    values = []
    for m, output in enumerate(outputs):
        try:
            values.append(float(parts(output, m)))
        except Exception as error:
            if parts.counted:
                return None
            raise InputError(
                f"loss_fn raises {type(error).__name__}: {error}; it works on the whole batch and fails on microbatch "
                f"{m}, {parts.sizes[m]} of {sum(parts.sizes)} rows: give what belongs to rows by target=; {WAY_OUT}"
            ) from error
    return None if parts.values and not adds_up(parts.counted, list(parts.values.values())) else values


@contextlib.contextmanager
def _pure(loss_fn: Any) -> Iterator[None]:
    """Raise InputError at the end when random numbers were drawn, or the loss changed buffers of its own."""
    module = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
    versions = {name: buffer._version for name, buffer in module.named_buffers()}
    with state.borrowed(module):
        before = state.random_states()
        yield
        draws = state.random_states() != before
        changed = [name for name, buffer in module.named_buffers() if versions.get(name) != buffer._version]
    if changed:
        raise InputError(
            f"the loss changes its own buffer {changed[0]!r} when it is called, and would per microbatch; {WAY_OUT}"
        )
    if draws:
        raise InputError(f"the loss draws random numbers, which it would do per microbatch; {WAY_OUT}")


class WholeCheck:
    """Holds a proved loss against the whole batch in every step, where the outputs are small enough to be kept."""

    def __init__(self, parts: Parts, target: Any) -> None:
        self.parts, self.target = parts, target
        self.kept: dict[int, list[Any]] | None = {}
        self.bytes = 0

    def keep(self, flat: Sequence[Any], microbatch: int) -> None:
        """Keep the flat outputs of one microbatch, unless all together are too large."""
        kept = self.kept  # lanes that run the last stage at the same time keep outputs too
        if kept is None:
            return
        tensors = list(filter(_has_values, flat))
        self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        if self.bytes > _KEPT_BYTES:
            self.kept = None
        else:
            kept[microbatch] = [t.detach() if any(t is tensor for tensor in tensors) else t for t in flat]

    def told(self, microbatch: int, device: torch.device) -> list[torch.Tensor]:
        """Return what another process needs to check a microbatch too: its numbers of values, and its outputs."""
        kept = [] if self.kept is None else self.kept[microbatch]
        return [torch.tensor(self.parts.values.get(microbatch, ()), device=device), *filter(_has_values, kept)]

    def hear(self, microbatch: int, told: Sequence[torch.Tensor], outputs: Outputs) -> None:
        """Take what another process tells of a microbatch; this one has had the first."""
        values, *tensors = told
        if values.numel():
            self.parts.values[microbatch] = values.tolist()
        if self.kept is not None and tensors:
            there = iter(tensors)
            first = [None if isinstance(leaf, Placeholder) else leaf for leaf in self.kept[0]]
            flat = [next(there) if _has_values(leaf) else leaf for leaf in first]
            self.keep(with_placeholders(outputs, flat, microbatch), microbatch)
        else:
            self.kept = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept."""
        return [leaf for flat in (self.kept or {}).values() for leaf in flat if _has_values(leaf)]

    def compare(self, parts: Parts, losses: Sequence[torch.Tensor], traced: TracedGraph) -> None:
        """Raise InputError when the loss of the whole batch is not what the microbatches add up to.

        ``losses`` come from ``parts``; if these are of a larger batch, the losses are computed again for this one. All
        are read together after the step was issued: the only time that the host waits for the device.
        """
        parts.check_values()
        if self.kept is None:
            return
        kept = [self.kept[microbatch] for microbatch in sorted(self.kept)]
        if parts is not self.parts:
            with torch.no_grad():
                losses = [self.parts(traced.unflatten(flat), microbatch) for microbatch, flat in enumerate(kept)]
        flat = [
            joined(parts, dim) if dim is not None else parts[0]
            for parts, dim in zip(zip(*kept, strict=True), traced.batch_outputs, strict=True)
        ]
        with torch.no_grad():
            whole = call_loss(self.parts.loss_fn, traced.unflatten(flat), self.target)
        *values, total = torch.stack([loss.double() for loss in (*losses, whole.to(losses[0].device))]).tolist()
        if not _close(values, total, whole.dtype) and math.isfinite(total):
            raise InputError(
                f"the loss was a {_WORDS[self.parts.kind]} on the first batch and is none on this one: "
                f"{total:.6g} on the whole batch, {math.fsum(values):.6g} from its microbatches; no gradient "
                f"was added; {WAY_OUT}"
            )


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, Placeholder)


def _close(values: Sequence[float], whole: float, dtype: torch.dtype) -> bool:
    """Tell whether values add up to the whole, up to the rounding of the largest of them."""
    scale = max(abs(whole), *map(abs, values), _TINY)
    return abs(sum(values) - whole) <= _tolerance(dtype) * scale


def _tolerance(dtype: torch.dtype) -> float:
    """Return what rounding in the parts and in the whole explains."""
    return min(2 * ROUNDING.get(dtype, _ROUGHEST), _ROUGHEST)
