"""How the losses of microbatches add up to the loss of the batch.

kind              what microbatch m adds                                     for
"mean"            its loss, times its share of the rows                      a mean over rows
"sum"             its loss                                                   a sum over rows
"counted"         as "mean"; torch's losses in it their part of the whole    torch's losses, and means beside them
"counted sum"     as "sum"; torch's losses in it their part of the whole     torch's losses, and sums beside them

torch's own losses are found where they are called, so a lambda, a ``functools.partial``, a module and a scaled loss
(``scaler.scale(F.cross_entropy(...))``) are as exact as the loss itself:

    whole batch    Count: which losses are called, and what each one's mean divides by   divisor 37 (of 64 targets)
    microbatch m   LossShare: the same calls give their part of that mean                sum over m / 37

A mean over elements counts elements, ``batchmean`` the first dimension, cross entropy and NLL the targets that are not
ignored or their class weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autosplit.errors import InputError
from autosplit.trace.reductions.losses import LossCall, class_weights, is_loss

WAY_OUT = (
    "pass loss_reduction='mean' or 'sum' if that is what you want, or call pipe(x) and loss.backward(), which computes "
    "it on the whole batch; exact in train_step are torch's losses with reduction='mean' and ignore_index=, and a sum "
    "divided by a number that was counted in the whole target before the call"
)


def check_target(loss_fn: Any, target: Any) -> None:
    """Raise InputError where a loss takes an output and a target, and no target was given."""
    if loss_fn is None or target is not None or not callable(loss_fn):
        return
    if isinstance(loss_fn, FunctionType) and loss_fn.__code__.co_argcount <= 1:
        return
    try:
        parameters = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [name for name, p in parameters.items() if p.kind in kinds and p.default is p.empty]
    if len(needed) > 1:
        raise InputError(
            f"loss_fn takes {' and '.join(needed[:2])}, and there is no target=: positional arguments are the model's "
            "inputs; write train_step(x, target=y, loss_fn=...)"
        )


def call_loss(loss_fn: Callable[..., Any], output: Any, target: Any) -> torch.Tensor:
    """Call the caller's loss function; of several results, the loss is the one called "loss", or else the first.

    Raises InputError when that is no scalar.
    """
    returned = loss_fn(output) if target is None else loss_fn(output, target)
    loss = _first(returned)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else _described(returned)
        raise InputError(f"loss_fn must return a scalar (0-dim) tensor, it returned {got}; reduce it by mean or sum")
    return loss


def _first(returned: Any) -> Any:
    if isinstance(returned, torch.Tensor):
        return returned
    if isinstance(returned, Mapping):
        return returned.get("loss")
    if isinstance(named := getattr(returned, "loss", None), torch.Tensor):
        return named
    return returned[0] if isinstance(returned, (tuple, list)) and returned else None


def _described(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} with {', '.join(map(repr, returned)) or 'nothing'} and no tensor 'loss'"
    if isinstance(returned, (tuple, list)):
        return f"a {type(returned).__name__} that does not begin with a tensor"
    return f"a {type(returned).__name__}"


def is_known(loss_fn: Any) -> bool:
    """Tell whether a loss is one of torch's: a function, a partial of one by keywords, or a module of ``torch.nn``.

    Raises InputError for a module that reduces nothing.
    """
    while isinstance(loss_fn, partial) and not loss_fn.args:
        loss_fn = loss_fn.func
    if is_loss(loss_fn):
        return True
    reduction = getattr(loss_fn, "reduction", None)
    if isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == "torch.nn.modules.loss" and reduction is not None:
        if reduction not in ("mean", "sum", "batchmean"):
            raise InputError(
                f"{type(loss_fn).__name__}(reduction={reduction!r}) returns no scalar; use reduction='mean' or 'sum'"
            )
        return not (loss_fn._forward_hooks or loss_fn._forward_pre_hooks)
    return False


class Parts:
    """What each microbatch adds to the loss of the batch: ``parts(output, m)``.

    Attributes:
        kind: one of the kinds in this module's docstring.
        counted: torch's losses on the whole batch, for the kinds that count.
        wants: the names of the outputs that the loss uses; None: all.
        values: per microbatch that was called, how many values each of them had.
    """

    takes_values = False

    def __init__(
        self,
        kind: str,
        loss_fn: Callable[..., Any],
        sizes: Sequence[int],
        targets: Sequence[Any],
        counted: Sequence[Counted] = (),
        wants: frozenset[str] | None = None,
        of_parts: Sequence[float] = (),
    ) -> None:
        """``of_parts``: what one of torch's losses, which is all of ``loss_fn``, divides by on each microbatch."""
        self.wants, self._of_parts = wants, of_parts
        self.kind, self.loss_fn, self.sizes, self.targets, self.counted = kind, loss_fn, sizes, targets, counted
        self.values: dict[int, list[int]] = {}
        self._rows, self._whole = sum(sizes), counted

    @property
    def divisors(self) -> list[float]:
        """What torch's losses in it divide by, on these rows."""
        return [float(counted.divisor) for counted in self.counted]

    def among(self, rows: int, divisors: Sequence[float]) -> Parts:
        """Return what the same microbatches add to the loss of a larger batch, by its rows and divisors."""
        larger = Parts(self.kind, self.loss_fn, self.sizes, self.targets, self.counted, self.wants, self._of_parts)
        larger._rows = rows
        larger._whole = [counted.by(divisor) for counted, divisor in zip(self.counted, divisors, strict=True)]
        return larger

    def __call__(self, output: Any, microbatch: int) -> torch.Tensor:
        """Return what a microbatch adds, for the model's output on it."""
        if self._of_parts:
            share = self._of_parts[microbatch] / self._whole[0].divisor
            return call_loss(self.loss_fn, output, self.targets[microbatch]) * share
        share = self.sizes[microbatch] / self._rows if self.kind in ("mean", "counted") else 1.0
        if not self.kind.startswith("counted"):
            return call_loss(self.loss_fn, output, self.targets[microbatch]) * share
        try:
            with LossShare(self._whole, times=1.0 / share) as mode:
                loss = call_loss(self.loss_fn, output, self.targets[microbatch]) * share
        except NotAdditive:
            raise _other_calls(microbatch, len(self.counted)) from None
        self.values[microbatch] = mode.values
        return loss

    def check_values(self) -> None:
        """Raise InputError when the values of the microbatches' losses are not those of the whole batch's."""
        if self.values and not adds_up(self.counted, list(self.values.values())):
            raise _other_calls(next(iter(self.values)), len(self.counted))


def _other_calls(microbatch: int, calls: int) -> InputError:
    return InputError(
        f"loss_fn calls {calls} of torch's losses on the whole batch and others on microbatch {microbatch}; no "
        f"gradient was added; {WAY_OUT}"
    )


def adds_up(whole: Sequence[Counted], parts: Sequence[Sequence[int]]) -> bool:
    """Tell whether microbatches call the losses that the whole batch calls, each on its part of the values."""
    return all(len(values) == len(whole) for values in parts) and all(
        counted.values == sum(numbers) for counted, numbers in zip(whole, zip(*parts, strict=True), strict=True)
    )


def plain_divisors(whole: Sequence[Counted], parts: Sequence[Sequence[Counted]]) -> list[float]:
    """Return what a mean divides by on each microbatch, where there is one, and numbers of values say so; else none."""
    calls = [call for each in (whole, *parts) for call in each]
    plain = all(call.mean and call.values and not isinstance(call.divisor, torch.Tensor) for call in calls)
    return [call.divisor for (call,) in parts] if plain and len(calls) == len(parts) + 1 else []


def count(loss_fn: Callable[..., Any], output: Any, target: Any, device: torch.device) -> tuple[Counted, ...] | None:
    """Return torch's losses in a loss, without computing them; None where the output's values would be needed."""
    with torch.no_grad(), Count(device) as mode:
        try:
            call_loss(loss_fn, output, target)
        except Exception:  # whatever it is: the values decide, and this output has none
            return None
    unknown = any(isinstance(c.divisor, torch.Tensor) and c.divisor.is_meta for c in mode.counted)
    return None if unknown or not mode.counted else tuple(mode.counted)


_NARROW = (torch.float16, torch.bfloat16)


class NotAdditive(Exception):
    """A microbatch does not call the losses that the whole batch calls."""


@dataclass(frozen=True)
class Counted:
    """One call of a loss on the whole batch.

    Attributes:
        values: how many values there are before the reduction; those of the microbatches must add up to it.
        divisor: what a mean divides their sum by: a number, or a tensor where it depends on targets or weights.
        mean: whether it is a mean.
    """

    values: int
    divisor: Any
    mean: bool = True

    def by(self, divisor: float) -> Counted:
        """Return the same with another divisor."""
        current = self.divisor
        return replace(self, divisor=current.new_tensor(divisor) if isinstance(current, torch.Tensor) else divisor)

    @classmethod
    def of(cls, call: LossCall) -> Counted:
        """Count a call on tensors; raises RuntimeError where weights of the batch's rows meet a microbatch's."""
        probabilities = call.by_class and bool(call.named["target"].is_floating_point())
        shape = call.shape(lambda tensor: tensor.shape, probabilities=probabilities) or ()
        weights = [call.named.get(name) for name in ("weight", "pos_weight")] if call.elementwise else []
        if any(weight is not None for weight in weights):
            shape = torch.broadcast_shapes(shape, *(weight.shape for weight in weights if weight is not None))
        values = math.prod(shape)
        if call.reduction == "batchmean":
            return cls(values, call.first.shape[0] if call.first.dim() else 1)
        if call.weighted:
            return cls(values, call.weight.detach().sum())
        if call.by_class and not probabilities:
            return cls(values, class_weights(call.named["target"], call.named["ignore_index"], call.weight).sum())
        return cls(values, values, mean=call.reduction == "mean")


class Count(TorchFunctionMode):
    """Counts what torch's losses divide by; ``counted`` has one entry per call.

    With ``device`` the losses themselves do not run: each gives a zero on that device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.device = device
        self.counted: list[Counted] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        call = LossCall.of(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        self.counted.append(Counted.of(call))
        if self.device is None:
            return func(*args, **(kwargs or {}))
        return torch.zeros((), dtype=call.first.dtype, device=self.device)


class LossShare(TorchFunctionMode):
    """Makes torch's losses give ``times`` a microbatch's part of the whole batch's value.

    ``values`` has one entry per call. Raises NotAdditive when there are more calls than on the whole batch.
    """

    def __init__(self, whole: Sequence[Counted], *, times: float = 1.0) -> None:
        super().__init__()
        self.whole = whole
        self.times = times
        self.values: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        call = LossCall.of(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        if len(self.values) == len(self.whole):
            raise NotAdditive
        counted = self.whole[len(self.values)]
        piece = Counted.of(call)
        self.values.append(piece.values)
        return _share(call, piece, counted) * self.times


def _share(call: LossCall, piece: Counted, whole: Counted) -> Any:
    """Return a microbatch's part of the whole batch's value."""
    if call.reduction == "sum":
        return _run(call, "sum")
    if isinstance(whole.divisor, torch.Tensor):
        if call.first.dtype in _NARROW and not torch.is_autocast_enabled(call.first.device.type):
            # a sum over many values has no room in 16 bits; autocast takes these losses to 32 by itself
            return _run(call, "sum", wide=True).div(whole.divisor).to(call.first.dtype)
        return _run(call, "sum") / whole.divisor
    if piece.values == 0:  # its own mean would be nan
        return _run(call, "sum") * (1.0 / whole.divisor if whole.divisor else math.nan)
    return _run(call, call.reduction) * (piece.divisor / whole.divisor)


def _run(call: LossCall, reduction: str, *, wide: bool = False) -> Any:
    arguments = {**call.named, "reduction": reduction}
    if wide:
        narrow = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.dtype in _NARROW}
        arguments |= {name: value.float() for name, value in narrow.items()}
    return call.function(**arguments)
