"""torch's own losses inside a loss function, so that the microbatches' values add up to the batch's.

    whole batch    Count: which losses are called, and what each one's mean divides by   divisor 37 (of 64 targets)
    microbatch m   Share: the same calls give their part of that mean                    sum over m / 37

A mean over elements counts elements, ``batchmean`` the first dimension, cross entropy and NLL the targets that are not
ignored or their class weights. All are found where they are called, so a lambda, a ``functools.partial``, a module and
a scaled loss (``scaler.scale(F.cross_entropy(...))``) are as exact as the loss itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_PLAIN_ELEMENTS = (
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
_WEIGHTED_ELEMENTS = (F.mse_loss, F.l1_loss)
"""Their mean divides by the sum of the weights, where there are any."""
_VECTORS = (
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
)
_LINEAR = getattr(F, "linear_cross_entropy", None)
_CLASSES = (F.cross_entropy, F.nll_loss, *([_LINEAR] if _LINEAR is not None else []))
_KNOWN = (*_PLAIN_ELEMENTS, *_WEIGHTED_ELEMENTS, *_VECTORS, *_CLASSES, F.ctc_loss)
_SIGNATURES = {function: inspect.signature(function) for function in _KNOWN}
_MISSING = inspect.Parameter.empty
_DEFAULTS = {f: {name: p.default for name, p in own.parameters.items()} for f, own in _SIGNATURES.items()}
_IDENTITIES = frozenset(map(id, _KNOWN))
_OPERANDS = ("input", "input1", "input2", "target", "weight", "pos_weight")
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


def is_torchs(function: Any) -> bool:
    """Tell whether a function is one of torch's losses."""
    return id(function) in _IDENTITIES


class Count(TorchFunctionMode):
    """Counts what torch's losses divide by; ``counted`` has one entry per call.

    With ``device`` the losses themselves do not run: each gives a zero on that device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.device = device
        self.counted: list[Counted] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        call = _Call.of(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        self.counted.append(Counted(call.values, call.divisor))
        if self.device is None:
            return func(*args, **(kwargs or {}))
        return torch.zeros((), dtype=call.dtype(), device=self.device)


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
        call = _Call.of(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        if len(self.values) == len(self.whole):
            raise NotAdditive
        counted = self.whole[len(self.values)]
        self.values.append(call.values)
        return call.share(counted) * self.times


@dataclass(frozen=True)
class _Call:
    """A call of a loss that reduces, its arguments by name."""

    function: Callable[..., Any]
    given: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        """Return a call of a loss; None for any other function, and for a loss that is not reduced."""
        if not is_torchs(function):
            return None
        given = _bound(function, args, kwargs)
        if given.get("size_average") is not None or given.get("reduce") is not None:
            return None  # deprecated ways to say it
        own_distance = given.get("distance_function") is not None
        return None if own_distance or given["reduction"] not in ("mean", "sum", "batchmean") else cls(function, given)

    @property
    def first(self) -> torch.Tensor:
        """What is compared with the target."""
        return next(iter(self.given.values()))

    def dtype(self) -> torch.dtype:
        """Return the dtype of the value."""
        return self.first.dtype

    @cached_property
    def values(self) -> int:
        """How many values there are before the reduction."""
        given, first = self.given, self.first
        if self.function is F.ctc_loss:
            return first.shape[1] if first.dim() == 3 else 1
        if any(self.function is known for known in _CLASSES):
            target = given["target"]
            return target.numel() // self._classes() if self._probabilities() else target.numel()
        if any(self.function is known for known in _VECTORS):
            return first.numel() // max(1, first.shape[-1] if first.dim() else 1)
        shapes = {given[name].shape for name in _OPERANDS if given.get(name) is not None}
        return math.prod(torch.broadcast_shapes(*shapes) if len(shapes) > 1 else shapes.pop())

    @cached_property
    def divisor(self) -> Any:
        """What the mean divides the sum of all values by."""
        given = self.given
        weight = given.get("weight")
        if given["reduction"] == "batchmean":
            return self.first.shape[0] if self.first.dim() else 1
        if weight is not None and any(self.function is known for known in _WEIGHTED_ELEMENTS):
            return weight.detach().sum()
        if any(self.function is known for known in _CLASSES) and not self._probabilities():
            ignored = given["ignore_index"]
            return class_weights(given["target"], -100 if ignored is None else ignored, weight)
        return self.values

    def share(self, whole: Counted) -> Any:
        """Return this microbatch's part of the whole batch's value."""
        if self.given["reduction"] == "sum":
            return self._run("sum")
        if isinstance(whole.divisor, torch.Tensor):
            if self.first.dtype in _NARROW and not torch.is_autocast_enabled(self.first.device.type):
                # a sum over many values has no room in 16 bits; autocast takes these losses to 32 by itself
                return self._run("sum", wide=True).div(whole.divisor).to(self.first.dtype)
            return self._run("sum") / whole.divisor
        if self.values == 0:  # its own mean would be nan
            return self._run("sum") * (1.0 / whole.divisor if whole.divisor else math.nan)
        return self._run(self.given["reduction"]) * (self.divisor / whole.divisor)

    def _run(self, reduction: str, *, wide: bool = False) -> Any:
        given = {**self.given, "reduction": reduction}
        if wide:
            narrow = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and v.dtype in _NARROW}
            given |= {name: value.float() for name, value in narrow.items()}
        return self.function(**given)

    def _probabilities(self) -> bool:
        return bool(self.given["target"].is_floating_point())

    def _classes(self) -> int:
        target = self.given["target"]
        return max(1, target.shape[1 if target.dim() > 1 else 0])


def _bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, in order, defaults too; as ``inspect.Signature.bind``, which takes much longer."""
    defaults = _DEFAULTS[function]
    by_place = dict(zip(defaults, args, strict=False))
    given = {**defaults, **by_place, **kwargs}
    fits = len(args) <= len(defaults) and len(given) == len(defaults) and by_place.keys().isdisjoint(kwargs)
    if not fits or any(value is _MISSING for value in given.values()):
        _SIGNATURES[function].bind(*args, **kwargs)  # says what is wrong
    return given


def class_weights(target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the class weights of the targets that count, or their number."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return weight.detach()[target.where(counts, 0)].where(counts, 0).sum()
