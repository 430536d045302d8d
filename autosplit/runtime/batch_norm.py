"""Norms with running statistics on one microbatch: normalised by its own statistics, which are put aside.

    norm(x) ─► torch's own kernel, its running statistics two empty tensors ─► y, gradients: torch's own bits
                                            └─► mean, variance ─► CellContext.state.statistics (running_statistics.py)

The kernel computes both statistics anyway; with momentum 1 it writes them where it would write the running ones.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from autosplit.runtime.lanes.ambient import is_transformed
from autosplit.runtime.ops import CellContext
from autosplit.runtime.running_statistics import Collected, Part, Use
from autosplit.trace.scope import has_module_hooks

_SIGNATURES = {function: inspect.signature(function) for function in (F.batch_norm, F.instance_norm)}
_FAR = 64
"""A mean this many standard deviations from zero is rounded by more than the variance of several parts can bear."""
_COUNTER = "num_batches_tracked"


def normalise(key: CellContext, name: str, norm: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a norm on a microbatch: a module, ``F.batch_norm`` or ``F.instance_norm``, with its own arguments.

    ``name`` is that of the call in the model's forward. A norm that takes no statistics is called as it is.
    """
    if not isinstance(norm, nn.Module):
        return _Call(key, name)(norm, *args, **kwargs)
    if type(norm).forward is _BatchNorm.forward and len(args) == 1 and not (kwargs or _is_watched(norm)):
        return _plain_module(key, name, norm, args[0])
    counts = isinstance(norm, _BatchNorm) and norm.num_batches_tracked is not None
    call = _Call(key, name, norm.num_batches_tracked if counts else None, cumulative=counts and norm.momentum is None)
    with _copied_counter(norm) if counts else contextlib.nullcontext(), _Norms(call):
        return norm(*args, **kwargs)


def _is_watched(norm: nn.Module) -> bool:
    """Tell whether a call of a module is more than its forward: hooks, or a forward put in its place."""
    hooks = norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks
    return any(hooks) or "forward" in norm.__dict__ or has_module_hooks()


def _plain_module(key: CellContext, name: str, norm: Any, value: torch.Tensor) -> torch.Tensor:
    """Do what the forward of torch's own batch norm does."""
    mean, var = norm.running_mean, norm.running_var
    if not (norm.training and norm.track_running_stats) or mean is None or var is None:
        return norm(value)
    norm._check_input_dim(value)
    note = Note(key.state.statistics, key.microbatch, name, Use((mean, var), norm.momentum, norm.num_batches_tracked))
    return norm_and_collect_stats(note, F.batch_norm, value, mean, var, norm.weight, norm.bias, norm.eps)


class _Call:
    """Calls functional norms for a recorded call, also those inside a module that has hooks or its own Python."""

    def __init__(self, key: CellContext, name: str, counter: Any = None, *, cumulative: bool = False) -> None:
        self.key, self.name, self.counter, self.cumulative = key, name, counter, cumulative
        self.calls = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = _SIGNATURES[function].bind(*args, **kwargs)
        bound.apply_defaults()
        value, mean, var, weight, bias, takes_statistics, momentum, eps = bound.arguments.values()
        if not takes_statistics or mean is None or var is None:
            return function(*args, **kwargs)
        averaged = function is F.instance_norm
        use = Use((mean, var), None if self.cumulative else momentum, self.counter, averaged)
        name = f"{self.name}/{self.calls}" if self.calls else self.name
        self.calls += 1
        note = Note(self.key.state.statistics, self.key.microbatch, name, use)
        return norm_and_collect_stats(note, function, value, mean, var, weight, bias, eps)


class _Norms(TorchFunctionMode):
    """Hands the functional norms inside a module's own forward to a :class:`_Call`."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (partial(self.call, func) if func in _SIGNATURES else func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def _copied_counter(norm: nn.Module) -> Iterator[None]:
    """Let a module count its calls on a copy; its stage's cells run one after the other."""
    counter = norm._buffers[_COUNTER]
    assert counter is not None
    norm._buffers[_COUNTER] = counter.detach().clone()
    try:
        yield
    finally:
        norm._buffers[_COUNTER] = counter


class Note(NamedTuple):
    """Where a part goes: the call's state, the microbatch, the recorded call's name, and what it updates."""

    statistics: Collected
    microbatch: int
    name: str
    use: Use

    def __call__(self, part: Part) -> None:
        """Put a part aside."""
        self.statistics.add(self.name, self.microbatch, self.use, part)


def norm_and_collect_stats(
    note: Note,
    function: Callable[..., Any],
    value: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Normalise by the value's own statistics and hand these to ``note``; ``mean`` and ``var`` stay as they are.

    It is one call to function modes, which see what is normalised and whose running statistics are meant.
    """
    if has_torch_function((value,)):
        return handle_torch_function(
            norm_and_collect_stats, (value,), note, function, value, mean, var, weight, bias, eps
        )
    own, spread = torch.zeros_like(mean), torch.zeros_like(var)
    output = function(value, own, spread, weight, bias, True, 1.0, eps)
    if function is F.instance_norm:
        note(Part(value.shape[0], own, spread))
    else:
        note(Part(value.numel() // value.shape[1], own, spread, _rounded(value, own, spread)))
    return output


def _rounded(value: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor | None:
    """Return by how much a kernel rounded the means of a value, in float64; None where it does not matter.

    Looked at on the CPU only, where a look at a number costs no wait.
    """
    if mean.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        return None
    if not (mean * mean > _FAR**2 * var).any():
        return None
    with torch.no_grad():
        shape = [-1 if dim == 1 else 1 for dim in range(value.dim())]
        over = [dim for dim in range(value.dim()) if dim != 1]
        return (value.detach() - mean.view(shape)).mean(over, dtype=torch.float64)
