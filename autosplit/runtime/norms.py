"""Norms with running statistics: a microbatch is normalised by its own, and one update per step takes in all.

    norm(x) ─► torch's own kernel, its running statistics two rows of zeros ─► y, gradients: torch's own bits
                                            └─► count, mean, variance ─► CallState.statistics

    microbatch 0    count, mean, variance ─┐
    microbatch 1    count, mean, variance ─┼─► joined ─► one update, behind the last forward
    microbatch 2    count, mean, variance ─┘

The kernel computes both statistics anyway; with momentum 1 it writes them where it would write the running ones. Parts
are joined in float64, and the variance is the unbiased one, so that the first norm of a model gets the plain model's
numbers. A part that comes again, when a region runs again for its backward, is not counted again. Counters,
to which sums over rows are added, go the same way. Where a microbatch is the whole batch
norms are called as they are: running statistics then move in the forward, as in the plain model.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.fx.node import has_side_effect
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from autosplit.runtime.lanes.ambient import is_transformed
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.ops import CallState, CellContext
from autosplit.runtime.regions import is_recomputing
from autosplit.trace.recording.recording import by_name
from autosplit.trace.scope import runs_only

_FUNCTIONS = (F.batch_norm, F.instance_norm)
_COUNTING = (torch.Tensor.add_, torch.Tensor.add, torch.Tensor.__float__)
"""What a module does with its counter."""


class Moments(NamedTuple):
    """What a norm saw in one microbatch: values per channel, and their mean and unbiased variance, [channels] each."""

    values: int
    mean: torch.Tensor
    variance: torch.Tensor


@dataclass(eq=False)
class Use:
    """One call of a norm in the model's forward, or one sum into a counter: what it updates, and what it saw.

    Attributes:
        running: the running mean and variance, as the model holds them; twice the counter.
        momentum: weight of what was seen; None: the mean over all updates.
        batches: counter of updates, or None.
        kind: "values": parts are moments over values; "rows": averages of such over rows, as instance norm takes them;
            "sums": their means are what is added to a counter.
        parts: by microbatch.
        written: what the kernel writes to, a mean and a variance for each microbatch.
    """

    running: tuple[torch.Tensor, torch.Tensor]
    momentum: float | None = None
    batches: torch.Tensor | None = None
    kind: str = "sums"
    parts: dict[int, Moments] = field(default_factory=dict)
    written: Sequence[torch.Tensor] = ()

    def updates(self, *, each: bool) -> list[list[Moments]]:
        """Return the parts of each update: of all microbatches in order, or one by one."""
        parts = [seen for _, seen in sorted(self.parts.items())]
        return [[seen] for seen in parts] if each else [parts]


@torch.no_grad()
def update_statistics(state: CallState, lanes: Sequence[Lane]) -> None:
    """Update the running statistics of all norms by what they saw in the step, when its last forward is over.

    Each is updated once per use, or per use and microbatch, on a lane of its device. All uses of one layer lie in one
    stage, whose cells run one after the other: for each layer they come in the model's order. torch's own kernels do
    not count their writes to running statistics as changes in place; nor are these.
    """
    homes: dict[torch.device, list[Use]] = defaultdict(list)
    for use in state.statistics.values():
        homes[lanes[0].origin(use.running[0]).device if lanes else use.running[0].device].append(use)
    state.statistics.clear()
    for device, uses in homes.items():
        with _on(device, lanes):
            for together in _together((use, parts) for use in uses for parts in use.updates(each=state.update_each)):
                _update(*zip(*together, strict=True))


has_side_effect(update_statistics)


def _together(updates: Iterable[tuple[Use, list[Moments]]]) -> list[list[tuple[Use, list[Moments]]]]:
    """Group updates that can run as one: of one kind, of equal counts of values, and of different tensors."""
    groups, turns = defaultdict[Any, list[Any]](list), defaultdict[int, int](int)
    memory: Callable[[Any], int] = id if is_transformed() else torch.Tensor.data_ptr
    for use, parts in updates:
        changed = [*map(memory, use.running), id(use if use.batches is None else use.batches)]
        turn = max(turns[tensor] for tensor in changed)
        turns.update(dict.fromkeys(changed, turn + 1))
        counts = [seen.values for seen in parts]
        groups[turn, use.kind, use.momentum, use.batches is None, *counts].append((use, parts))
    return [groups[key] for key in sorted(groups, key=itemgetter(0))]


def _update(uses: Sequence[Use], parts: Sequence[Sequence[Moments]]) -> None:
    """Update the running statistics, or the counters, of norms."""
    first, counters = uses[0], [use.batches for use in uses if use.batches is not None]
    running = [use.running[which].data for which in (0, 1) for use in uses]
    if first.kind == "sums":
        for counter, of_counter in zip(running, parts, strict=False):
            counter.add_(reduce(torch.add, (seen.mean for seen in of_counter)))
        return
    if counters:
        torch._foreach_add_(counters, 1)
    widths = [tensor.numel() for tensor in running]
    weight: float | torch.Tensor = 1.0 if first.momentum is None else first.momentum
    if first.momentum is None and counters:  # not read by the host, which would wait for the device
        shares = (1.0 / counter.double() for counter in counters)
        weight = torch.cat([share.expand(width) for share, width in zip(shares, widths, strict=False)])
    counts = [seen.values for seen in parts[0]]
    values = [moment for index in (1, 2) for row in zip(*parts, strict=True) for moment in map(itemgetter(index), row)]
    seen = _seen(torch.cat(values).view(2, len(counts), -1), counts, widths[: len(uses)], first.kind)
    after = torch.cat([tensor.flatten() for tensor in running]).double().view(2, -1) * (1 - weight) + seen * weight
    torch._foreach_copy_(
        running, [new.view_as(to) for new, to in zip(after.flatten().split(widths), running, strict=True)]
    )


def _seen(moments: torch.Tensor, counts: Sequence[int], widths: Sequence[int], kind: str) -> torch.Tensor:
    """Return mean and unbiased variance over all values of norms side by side, by those of their parts."""
    means, variances = moments.double()
    count, total = torch.stack([means.new_full((1,), n) for n in counts]), sum(counts)  # not copied from the host

    def added(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece.sum(0) for piece in values.split(widths, 1)])  # each to the bits that it has alone

    mean = added(means * (count / total))
    if kind == "rows":
        return torch.stack([mean, added(variances * (count / total))])
    squares = variances * (count - 1) + (means - mean).square() * count
    return torch.stack([mean, added(squares) / (total - 1)])


@contextlib.contextmanager
def _on(device: torch.device, lanes: Sequence[Lane]) -> Iterator[None]:
    """Work on a lane of a device, behind what all lanes of that device were given."""
    on_device = [lane for lane in lanes if lane.device == device and lane.asynchronous]
    if not on_device:
        yield
        return
    for other in on_device[1:]:
        on_device[0].wait(other.record())
    with on_device[0].active():
        yield


def normalise(key: CellContext, name: str, norm: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a norm on a microbatch: a module, ``F.batch_norm`` or ``F.instance_norm``, with its own arguments.

    ``name`` is that of the call in the model's forward. A norm that takes no statistics is called as it is, and so are
    all where the microbatch is the whole batch.
    """
    if key.state.whole and not is_recomputing():
        return norm(*args, **kwargs)
    if norm in _FUNCTIONS:
        return _call(key, name, None, norm, by_name(norm, args, kwargs).values())
    counter = norm.num_batches_tracked if isinstance(norm, _BatchNorm) else None
    if counter is not None and norm.training and norm.track_running_stats and runs_only(norm, _BatchNorm.forward):
        state = norm.running_mean, norm.running_var, norm.weight, norm.bias
        return _call(key, name, counter, F.batch_norm, (*args, *kwargs.values(), *state, True, norm.momentum, norm.eps))
    with _Norms(key, name, counter, {"momentum": None} if counter is not None and norm.momentum is None else {}):
        return (norm.forward if runs_only(norm, type(norm).forward) else norm)(*args, **kwargs)


@torch.no_grad()
def tally(key: CellContext, name: str, add: Any, counter: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Note what an in-place addition adds to a counter on a microbatch; ``name`` is that of the call."""
    added = add(torch.zeros_like(counter), *args, **kwargs)
    use = key.state.statistics.setdefault(name, Use((counter, counter)))
    use.parts.setdefault(key.microbatch, Moments(1, added, added))
    return counter


class _Norms(TorchFunctionMode):
    """Calls functional norms inside a module's own forward for a recorded call.

    What the module adds to its ``counter`` is left to the update of the step; an average over all updates reads one.
    """

    def __init__(self, key: CellContext, name: str, counter: Any, changed: dict[str, Any]) -> None:
        super().__init__()
        self.key, self.name, self.counter, self.changed = key, name, counter, changed
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            self.calls += 1
            arguments = by_name(func, args, kwargs or {}) | self.changed
            return _call(self.key, f"{self.name}/{self.calls}", self.counter, func, arguments.values())
        if func in _COUNTING and args[0] is self.counter:
            return 1.0 if func is torch.Tensor.__float__ else self.counter
        return func(*args, **(kwargs or {}))


def _call(key: CellContext, name: str, counter: Any, function: Any, arguments: Iterable[Any]) -> Any:
    """Call a functional norm, given all its arguments, with others in the place of its running statistics."""
    value, mean, var, weight, bias, takes_statistics, momentum, eps = arguments
    if not takes_statistics or mean is None or var is None:
        return function(value, mean, var, weight, bias, takes_statistics, momentum or 0.0, eps)
    (state, microbatch), by_rows = key, function is F.instance_norm
    if is_recomputing():
        mean, var = torch.zeros_like(mean), torch.zeros_like(var)
    else:
        if (use := state.statistics.get(name)) is None:
            use = state.statistics[name] = Use((mean, var), momentum, counter, "rows" if by_rows else "values")
            use.written = mean.new_zeros(2 * state.microbatches, mean.numel()).unbind()
        mean, var = use.written[2 * microbatch : 2 * microbatch + 2]
        use.parts[microbatch] = Moments(len(value) if by_rows else value.numel() // value.shape[1], mean, var)
    return function(value, mean, var, weight, bias, True, 1.0, eps)
