"""How the losses of microbatches add up to the loss of the batch.

kind              what microbatch m adds                                     for
"mean"            its loss, times its share of the rows                      a mean over rows
"sum"             its loss                                                   a sum over rows
"counted"         as "mean"; torch's losses in it their part of the whole    torch's losses, and means beside them
"counted sum"     as "sum"; torch's losses in it their part of the whole     torch's losses, and sums beside them
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.runtime.loss.calls import Count, Counted, NotAdditive, Share
from autosplit.trace.reductions.losses import is_loss

REDUCTIONS = ("auto", "mean", "sum")
WAY_OUT = (
    "pass loss_reduction='mean' or 'sum' if that is what you want, or call pipe(x) and loss.backward(), which computes "
    "it on the whole batch"
)


def check_reduction(reduction: str) -> None:
    """Raise InputError for a reduction that there is not."""
    if reduction not in REDUCTIONS:
        raise InputError(f"loss_reduction={reduction!r} is not available; valid: {', '.join(map(repr, REDUCTIONS))}")


def check_target(loss_fn: Any, target: Any) -> None:
    """Raise InputError where a loss takes an output and a target, and no target was given."""
    if loss_fn is None or target is not None or not callable(loss_fn):
        return
    try:
        parameters = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [name for name, own in parameters.items() if own.kind in kinds and own.default is own.empty]
    if len(needed) > 1:
        raise InputError(
            f"loss_fn takes {' and '.join(needed[:2])}, and there is no target=: positional arguments are the model's "
            "inputs; write train_step(x, target=y, loss_fn=...)"
        )


def call_loss(loss_fn: Callable[..., Any], output: Any, target: Any) -> torch.Tensor:
    """Call the caller's loss; of several results it is the one called "loss", or else the first.

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
    own = getattr(loss_fn, "reduction", None)
    if isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == "torch.nn.modules.loss" and own is not None:
        if own not in ("mean", "sum", "batchmean"):
            raise InputError(
                f"{type(loss_fn).__name__}(reduction={own!r}) returns no scalar; use reduction='mean' or 'sum'"
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
    ) -> None:
        self.wants = wants
        self.kind, self.loss_fn, self.sizes, self.targets, self.counted = kind, loss_fn, sizes, targets, counted
        self.values: dict[int, list[int]] = {}
        rows = sum(sizes)
        self._shares = [size / rows for size in sizes]

    def __call__(self, output: Any, microbatch: int) -> torch.Tensor:
        """Return what a microbatch adds, for the model's output on it."""
        share = self._shares[microbatch] if self.kind in ("mean", "counted") else 1.0
        if not self.kind.startswith("counted"):
            return call_loss(self.loss_fn, output, self.targets[microbatch]) * share
        try:
            with Share(self.counted, times=1.0 / share) as mode:
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
        counted.values == sum(own) for counted, own in zip(whole, zip(*parts, strict=True), strict=True)
    )


def count(loss_fn: Callable[..., Any], output: Any, target: Any, device: torch.device) -> tuple[Counted, ...] | None:
    """Return torch's losses in a loss, without computing them; None where the output's values would be needed."""
    with torch.no_grad(), Count(device) as mode:
        try:
            call_loss(loss_fn, output, target)
        except Exception:  # whatever it is: the values decide, and this output has none
            return None
    unknown = any(isinstance(c.divisor, torch.Tensor) and c.divisor.is_meta for c in mode.counted)
    return None if unknown or not mode.counted else tuple(mode.counted)
