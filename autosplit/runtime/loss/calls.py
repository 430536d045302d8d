"""torch's own losses inside a loss function, so that the microbatches' values add up to the batch's.

    whole batch    Count: which losses are called, and what each one's mean divides by   divisor 37 (of 64 targets)
    microbatch m   Share: the same calls give their part of that mean                    sum over m / 37

A mean over elements counts elements, ``batchmean`` the first dimension, cross entropy and NLL the targets that are not
ignored or their class weights. All are found where they are called, so a lambda, a ``functools.partial``, a module and
a scaled loss (``scaler.scale(F.cross_entropy(...))``) are as exact as the loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autosplit.trace.reductions.losses import LossCall, class_weights

_NARROW = (torch.float16, torch.bfloat16)


class NotAdditive(Exception):
    """A microbatch does not call the losses that the whole batch calls."""


@dataclass(frozen=True)
class Counted:
    """One call of a loss on the whole batch.

    Attributes:
        values: how many values there are before the reduction; those of the microbatches must add up to it.
        divisor: what a mean divides their sum by: a number, or a tensor where it depends on targets or weights.
    """

    values: int
    divisor: Any

    @classmethod
    def of(cls, call: LossCall) -> Counted:
        """Count a call on tensors; raises RuntimeError where weights of the batch's rows meet a microbatch's."""
        probabilities = call.by_class and bool(call.given["target"].is_floating_point())
        shape = call.shape(lambda tensor: tensor.shape, probabilities=probabilities) or ()
        weights = [call.given.get(name) for name in ("weight", "pos_weight")] if call.elementwise else []
        values = math.prod(torch.broadcast_shapes(shape, *(w.shape for w in weights if w is not None)))
        if call.reduction == "batchmean":
            return cls(values, call.first.shape[0] if call.first.dim() else 1)
        if call.weighted:
            return cls(values, call.weight.detach().sum())
        if call.by_class and not probabilities:
            return cls(values, class_weights(call.given["target"], call.given["ignore_index"], call.weight).sum())
        return cls(values, values)


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


class Share(TorchFunctionMode):
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
        part = Counted.of(call)
        self.values.append(part.values)
        return _share(call, part, counted) * self.times


def _share(call: LossCall, part: Counted, whole: Counted) -> Any:
    """Return a microbatch's part of the whole batch's value."""
    if call.reduction == "sum":
        return _run(call, "sum")
    if isinstance(whole.divisor, torch.Tensor):
        if call.first.dtype in _NARROW and not torch.is_autocast_enabled(call.first.device.type):
            # a sum over many values has no room in 16 bits; autocast takes these losses to 32 by itself
            return _run(call, "sum", wide=True).div(whole.divisor).to(call.first.dtype)
        return _run(call, "sum") / whole.divisor
    if part.values == 0:  # its own mean would be nan
        return _run(call, "sum") * (1.0 / whole.divisor if whole.divisor else math.nan)
    return _run(call, call.reduction) * (part.divisor / whole.divisor)


def _run(call: LossCall, reduction: str, *, wide: bool = False) -> Any:
    given = {**call.given, "reduction": reduction}
    if wide:
        narrow = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and v.dtype in _NARROW}
        given |= {name: value.float() for name, value in narrow.items()}
    return call.function(**given)
