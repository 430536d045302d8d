"""Follows axes through a run on fake tensors: each operation unites, divides or makes axes.

A rule gives the axes of an operation's results and a :class:`Call`: which axes the operation cannot do in parts
(``blocked``), and in what its result is linear. Operations without a rule can do none of their axes in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.profile.node_costs.flops import flat_tensors, flop_formulas
from autosplit.tensor.axes import Axis, Incompatible
from autosplit.trace.inputs.objects import storage_key

Terms = tuple[tuple[int, ...], ...]


@dataclass
class Call:
    """One operation of a run.

    Attributes:
        inputs: its tensor operands, by their keys.
        outputs: its results.
        terms: the result is the sum of these products of operands; () where it is linear in none.
        blocked: axes of which it needs all elements at once.
        expands: it makes axes that no operand has by repeating elements.
        dim: its argument of that name.
        flops: how many operations on floating-point numbers it takes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    terms: Terms = ()
    blocked: list[Axis] = field(default_factory=list)
    expands: bool = False
    dim: Any = None
    flops: int = 0


class Follower(TorchDispatchMode):
    """Notes the operations that run under it, and the axes of every tensor that it meets."""

    def __init__(self, rules: dict[str, Callable[..., Terms]]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.changes_operands = False
        self.shared: set[int] = set()
        """The storages of the node's operands, and of tensors that have views: what changes them changes others."""
        self.rows_in_parts = False
        """The node that runs can look up rows of a part of a table."""
        self._rules = rules
        self._flops = flop_formulas()
        self._dims: dict[int, list[Axis]] = {}
        self.met: list[Tensor] = []
        """Every tensor whose axes are known."""

    def dims(self, tensor: Tensor) -> list[Axis]:
        """Return a tensor's axes: new ones where it is met first."""
        if id(tensor) not in self._dims:
            self.enter(tensor, [Axis(size) for size in tensor.shape])
        return self._dims[id(tensor)]

    def enter(self, tensor: Tensor, dims: Sequence[Axis]) -> None:
        """Note a tensor's axes."""
        assert [axis.size for axis in dims] == list(tensor.shape), (dims, tensor.shape)
        self._dims[id(tensor)] = list(dims)
        self.met.append(tensor)

    def moved(self, tensor: Tensor, dims: Sequence[Axis], *operands: Tensor) -> Terms:
        """Note a tensor's axes, and return the terms of an operation that moves its operands' elements."""
        self.enter(tensor, dims)
        return each(*operands)

    def unite(self, call: Call, *axes: Axis) -> Axis:
        """Make axes one; where their parts do not fit, the operation needs all of them at once."""
        for axis in axes[1:]:
            try:
                axes[0].unite(axis)
            except Incompatible:
                call.blocked += [axes[0], axis]
        return axes[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = ({storage_key(tensor) for tensor in flat_tensors(v)} for v in ((args, kwargs), result))
        if func._schema.is_mutable:
            self.changes_operands |= not inputs.isdisjoint(self.shared)
        else:
            self.shared |= inputs & outputs
        if next(flat_tensors(result), None) is None:
            return result
        packet = func.overloadpacket
        formula = self._flops.get(packet)
        self.note(func, packet.__name__, args, kwargs, result)
        if formula is not None:
            self.calls[-1].flops = int(formula(*args, **kwargs, out_val=result))
        return result

    def note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operation that ran."""
        operands, results = [*flat_tensors((args, kwargs))], [*flat_tensors(result)]
        for tensor in operands:
            self.dims(tensor)
        call = Call(tuple(map(id, operands)), dim=_named(func, "dim", args, kwargs))
        rule = self._rules.get(name)
        if rule is None and torch.Tag.pointwise in getattr(func, "tags", ()):
            rule = self._rules["pointwise"]
        try:
            if rule is None:
                raise Incompatible
            call.terms = rule(self, call, result, *args, **kwargs)
        except Incompatible:
            call.terms = ()
            call.blocked += [axis for tensor in operands for axis in self.dims(tensor)]
        for tensor in results:
            self.dims(tensor)
        call.outputs = tuple(map(id, results))
        self.calls.append(call)


def _named(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return an argument of an operation by its name."""
    for index, argument in enumerate(func._schema.arguments if func is not None else ()):
        if argument.name == name:
            default = argument.default_value if argument.has_default_value() else None
            return args[index] if index < len(args) else kwargs.get(name, default)
    return None


class KernelsAsOne(TorchFunctionMode):
    """Notes attention and products by groups as one operation each, whatever kernels a device has."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make their results instead of running them."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is getattr(torch, "_grouped_mm", None) or func is getattr(torch.nn.functional, "grouped_mm", None):
            return self._grouped(*args, **kwargs)
        return func(*args, **kwargs)

    def _blank(self, like: Tensor, width: int) -> Tensor:
        result = like.new_empty((*like.shape[:-1], width))
        self._follower.calls.pop()
        return result

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        result = self._blank(query, value.shape[-1])
        self._follower.note(None, "attention", (query, key, value, attn_mask), {}, result)
        self._follower.calls[-1].flops = (
            2 * query.shape[:-1].numel() * key.shape[-2] * (key.shape[-1] + value.shape[-1])
        )
        return result

    def _grouped(self, left: Tensor, two: Tensor, *, offs: Any = None, bias: Any = None, **_: Any) -> Tensor:
        result = self._blank(left, two.shape[-1])
        self._follower.note(None, "_grouped_mm", (left, two, offs, bias), {}, result)
        self._follower.calls[-1].flops = 2 * left.numel() * two.shape[-1]
        return result


def tensors_in(*values: Any) -> list[Tensor]:
    """Return those of the values that are tensors."""
    return [value for value in values if isinstance(value, Tensor)]


def each(*values: Any) -> Terms:
    """Return terms of one operand each."""
    return tuple((id(value),) for value in values if isinstance(value, Tensor))
