"""What autograd's engine does in a backward on fake tensors: which node runs, and what is summed in place.

Work in a backward belongs to the recorded node in whose range of sequence numbers that of its autograd node lies.

A value with several uses gets several gradients, which the engine adds up. On plain tensors it adds to the first in
place when nobody else holds it, as a view's base does (``can_accumulate_inplace`` in
``torch/csrc/autograd/input_buffer.cpp``); fake tensors are a subclass, for which it makes a new tensor: one too many is
alive. Here the sum is made in place in the engine's stead. So with gradients that are written into zeros: what ``max``,
``sort``, ``gather`` or an index took is put back in place, except for subclasses into a copy
(``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``).

Private torch API, used in this file only, tried on torch 2.13, as torch has no public names for it:
``torch._C._autograd._get_sequence_nr`` and ``torch._C._current_autograd_node`` tell whose turn it is;
``torch._C._storage_Use_Count`` and ``Tensor._use_count`` say who holds a gradient.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autosplit.trace.borrowed.blank import is_dense

_LEAF = 1 << 62
"""Autograd gives nodes that accumulate into leaves a number above all others."""


class Labels:
    """The node that runs, or in a backward the one whose operation's turn it is."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.names: list[str] = []
        self.running: list[str] = []
        self.repeating = False
        """A unit runs again: what goes between its nodes belongs to the one before."""
        self._last = ""

    def begin(self) -> None:
        """Begin a microbatch: what is done to its inputs belongs to no node, nor does the backward of that."""
        self.starts.append(torch._C._autograd._get_sequence_nr())
        self.names.append("")
        self.forget()

    def forget(self) -> None:
        """Begin a pass: what comes before its first node belongs to none."""
        self._last = ""

    @contextlib.contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Run a node."""
        self.starts.append(torch._C._autograd._get_sequence_nr())
        self.names.append(name)
        self.running.append(name)
        try:
            yield
        finally:
            self._last = self.running.pop()

    def current(self) -> str:
        """Return the node that something belongs to."""
        if self.running:
            return self.running[-1]
        node = None if self.repeating else torch._C._current_autograd_node()
        number = _LEAF if node is None else node._sequence_nr()
        if number < _LEAF:
            index = bisect.bisect_right(self.starts, number) - 1
            self._last = self.names[index] if index >= 0 else ""
        return self._last


_HOLDERS, _STORAGE_HOLDERS = 4, 2
"""How often a tensor and its storage are held inside a dispatch mode when only the engine's buffer has it."""

_FILLS = {
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
_FILLERS = frozenset("Max Min Median Nanmedian Mode Kthvalue Topk Sort Index IndexSelect Gather".split())
"""Operations whose backward writes into zeros of its own."""


def in_place_on_zeros(func: Any) -> Any:
    """Return the operation that autograd runs on plain tensors: in place where it writes a gradient into zeros."""
    filled = _FILLS.get(func)
    if filled is None or torch.is_grad_enabled():
        return func
    node = torch._C._current_autograd_node()
    name, _, rest = ("" if node is None else node.name()).partition("Backward")
    return filled if rest.isdecimal() and name in _FILLERS else func


def summed_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the sum of two gradients in one of them, where the engine would have added so; None for any other call."""
    if func is not torch.ops.aten.add.Tensor or len(args) != 2 or kwargs:
        return None
    if not all(isinstance(value, torch.Tensor) for value in args) or torch._C._current_autograd_node() is None:
        return None
    if torch.is_grad_enabled():  # a sum of the model's own, which is run again in the backward
        return None
    first: torch.Tensor = args[0]
    if not _is_alone(first) or first.shape != args[1].shape:
        return None
    if first.dtype != args[1].dtype and first.dtype != torch.result_type(first, args[1]):
        return None
    torch.ops.aten.add_.Tensor(first, args[1])
    return first


def _is_alone(tensor: Any) -> bool:
    held: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return bool(tensor._use_count() <= _HOLDERS and held <= _STORAGE_HOLDERS and is_dense(tensor))


class Guess(torch.autograd.Function):
    """Stands for an operation that does not run: connects its results to its inputs in the graph."""

    @staticmethod
    def forward(ctx: Any, count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the first values, as made from the others."""
        ctx.save_for_backward(*values[count:])
        ctx.count = count
        outputs = tuple(value.view_as(value) for value in values[:count])
        ctx.mark_non_differentiable(*(t for t in outputs if not (t.is_floating_point() or t.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Return new gradients for whoever wants one."""
        wanted = ctx.needs_input_grad[1 + ctx.count :]
        grads = (torch.empty_like(t) if need else None for t, need in zip(ctx.saved_tensors, wanted, strict=True))
        return (None,) * (1 + ctx.count) + tuple(grads)
