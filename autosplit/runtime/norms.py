"""Norms with running statistics: a microbatch is normalised by its own, and one update per step takes in all.

    norm(x) ─► torch's own kernel, its running statistics two empty tensors ─► y, gradients: torch's own bits
                                            └─► count, mean, variance ─► CallState.statistics

    microbatch 0    count, mean, variance ─┐
    microbatch 1    count, mean, variance ─┼─► joined ─► one update, behind the last forward
    microbatch 2    count, mean, variance ─┘

The kernel computes both statistics anyway; with momentum 1 it writes them where it would write the running ones. Parts
are joined in float64, and the variance is the unbiased one, so that the first norm of a model gets the plain model's
numbers. A part that comes again, when a region runs again for its backward, is not counted again. Counters,
to which sums over rows are added, go the same way.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.fx.node import has_side_effect
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.ops import CallState, CellContext

_DEFAULTS = {
    function: {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    for function in (F.batch_norm, F.instance_norm)
}
_COUNTING = (torch.Tensor.add_, torch.Tensor.add, torch.Tensor.__float__)
"""What a module does with its counter."""


@dataclass(frozen=True, eq=False)
class Part:
    """What a norm saw in one microbatch: values per channel, and their mean and unbiased variance, [channels] each."""

    count: int
    mean: torch.Tensor
    variance: torch.Tensor


@dataclass(eq=False)
class Use:
    """One call of a norm in the model's forward, or one sum into a counter: what it updates, and what it saw.

    Attributes:
        running: the running mean and variance, as the model holds them; twice the counter.
        momentum: weight of what was seen; None: the mean over all updates.
        batches: counter of updates, or None.
        averaged: the moments are averages over rows, as instance norm takes them, and are averaged further.
        added: the means are what the parts add to a counter.
        parts: by microbatch.
    """

    running: tuple[torch.Tensor, torch.Tensor]
    momentum: float | None
    batches: torch.Tensor | None
    averaged: bool = False
    added: bool = False
    parts: dict[int, Part] = field(default_factory=dict)

    def update(self, parts: Sequence[Part]) -> None:
        """Update the running statistics by some of the parts.

        torch's own kernels do not count their writes to running statistics as changes in place; nor are these.
        """
        if self.added:
            self.running[0].data.add_(reduce(torch.add, (part.mean for part in parts)))
            return
        if self.batches is not None:
            self.batches.add_(1)
        weight: float | torch.Tensor | None = self.momentum
        if weight is None:  # not read by the host, which would wait for the device
            weight = 1.0 if self.batches is None else 1.0 / self.batches.double()
        for running, value in zip(self.running, self._seen(parts), strict=True):
            running.data.copy_(running.double() * (1 - weight) + value.view_as(running) * weight)

    def _seen(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and unbiased variance over all values of several parts."""
        means = torch.stack([part.mean for part in parts]).double()
        variances = torch.stack([part.variance for part in parts]).double()
        counts = torch.stack([means.new_full((1,), part.count) for part in parts])  # not copied from the host
        total = sum(part.count for part in parts)
        mean = (means * (counts / total)).sum(0)
        if self.averaged:
            return mean, (variances * (counts / total)).sum(0)
        squares = variances * (counts - 1) + (means - mean).square() * counts
        return mean, squares.sum(0) / (total - 1)


@torch.no_grad()
def update_statistics(state: CallState, lanes: Sequence[Lane]) -> None:
    """Update the running statistics of all norms by what they saw in the step, when its last forward is over.

    Each is updated once per use, or per use and microbatch, on a lane of its device. All uses of one layer lie in one
    stage, whose cells run one after the other: for each layer they come in the model's order.
    """
    uses: list[Use] = list(state.statistics.values())
    state.statistics.clear()
    homes = [lanes[0].origin(use.running[0]).device if lanes else use.running[0].device for use in uses]
    for device in dict.fromkeys(homes):
        with _on(device, lanes):
            for use in (use for use, home in zip(uses, homes, strict=True) if home == device):
                parts = [use.parts[microbatch] for microbatch in sorted(use.parts)]
                for own in [[part] for part in parts] if state.update_each else [parts]:
                    use.update(own)


has_side_effect(update_statistics)


@contextlib.contextmanager
def _on(device: torch.device, lanes: Sequence[Lane]) -> Iterator[None]:
    """Work on a lane of a device, behind what all lanes of that device were given."""
    own = [lane for lane in lanes if lane.device == device and lane.asynchronous]
    if not own:
        yield
        return
    for other in own[1:]:
        own[0].wait(other.record())
    with own[0].active():
        yield


def normalise(key: CellContext, name: str, norm: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a norm on a microbatch: a module, ``F.batch_norm`` or ``F.instance_norm``, with its own arguments.

    ``name`` is that of the call in the model's forward. A norm that takes no statistics is called as it is.
    """
    if not isinstance(norm, nn.Module):
        return _Norms(key, name).normalise(norm, *args, **kwargs)
    counter = norm.num_batches_tracked if isinstance(norm, _BatchNorm) else None
    with _Norms(key, name, counter, cumulative=counter is not None and norm.momentum is None):
        return norm(*args, **kwargs)


@torch.no_grad()
def tally(key: CellContext, name: str, add: Any, counter: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Note what an in-place addition adds to a counter on a microbatch; ``name`` is that of the call."""
    part = add(torch.zeros_like(counter), *args, **kwargs)
    use = key.state.statistics.setdefault(name, Use((counter, counter), None, None, added=True))
    use.parts.setdefault(key.microbatch, Part(1, part, part))
    return counter


class _Norms(TorchFunctionMode):
    """Calls functional norms for a recorded call, also those inside a module's own forward.

    What the module adds to its ``counter`` is left to the update of the step; an average over all updates reads one.
    """

    def __init__(self, key: CellContext, name: str, counter: Any = None, *, cumulative: bool = False) -> None:
        super().__init__()
        self.key, self.name, self.counter, self.cumulative = key, name, counter, cumulative
        self.calls = 0

    def normalise(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named = _DEFAULTS[function] | dict(zip(_DEFAULTS[function], args, strict=False)) | kwargs
        value, mean, var, weight, bias, takes_statistics, momentum, eps = named.values()
        if not takes_statistics or mean is None or var is None:
            return function(*args, **kwargs)
        own, spread = torch.zeros_like(mean), torch.zeros_like(var)
        output = function(value, own, spread, weight, bias, True, 1.0, eps)
        averaged = function is F.instance_norm
        name = f"{self.name}/{self.calls}" if self.calls else self.name
        self.calls += 1
        made = Use((mean, var), None if self.cumulative else momentum, self.counter, averaged)
        count = value.shape[0] if averaged else value.numel() // value.shape[1]
        use = self.key.state.statistics.setdefault(name, made)
        use.parts.setdefault(self.key.microbatch, Part(count, own, spread))
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DEFAULTS:
            return self.normalise(func, *args, **(kwargs or {}))
        if func in _COUNTING and args[0] is self.counter:
            return 1.0 if func is torch.Tensor.__float__ else self.counter
        return func(*args, **(kwargs or {}))
