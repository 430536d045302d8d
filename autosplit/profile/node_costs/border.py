"""Run the nodes of a recording one at a time, each with a backward of its own.

    producer ──┐ detach: the value is a leaf that shares the storage
               ▼
             value ──► node ──► result ──┐ detach
               ▲          └─ backward ◄──┴─ cotangents of ones
               └─ gradient, dropped

What crosses from node to node is a leaf, so that ``torch.autograd.grad`` over one node reaches its inputs and
parameters and nothing before them. Detaching shares the storage: what autograd saves, and where, stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from autosplit.profile.node_costs.quantised import quantised_linear
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.scope import is_quantised


class Picks(dict[Any, Any]):
    """Stands for a nested result: what a graph picks out of it, by item or by attribute."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class _Alias(torch.autograd.Function):
    """Return a tensor on the same storage that is neither leaf nor view, so that operations may change it in place."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent


@dataclass(frozen=True)
class _Lent:
    """A value that its node may change in place, as ``alias``; ``version`` is what it was before."""

    value: torch.Tensor
    alias: torch.Tensor
    version: int

    @property
    def changed(self) -> bool:
        return self.alias._version != self.version


@dataclass(frozen=True)
class Invocation:
    """One node with its arguments: ``leaves`` are the tensors that its backward computes gradients for."""

    run: Callable[[], Any]
    leaves: tuple[torch.Tensor, ...]
    lent: tuple[_Lent, ...]

    def targets(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors from which a backward of the node starts: its results, and what it changed in place."""
        tensors = [t for t in tensors_of(result) if t.grad_fn is not None]
        seen = {id(t) for t in tensors}
        return tensors + [
            lent.alias
            for lent in self.lent
            if lent.changed and lent.alias.grad_fn is not None and id(lent.alias) not in seen
        ]

    def settle(self, result: Any) -> Any:
        """Return the result cut off from the node's own autograd graph, ready for the next node."""
        for lent in self.lent:
            if lent.changed and lent.alias.requires_grad and not lent.value.requires_grad:
                lent.value.requires_grad_()
        if isinstance(result, torch.Tensor):
            return _leaf(result)
        return pytree.tree_map_only(torch.Tensor, _leaf, result)


class BorderInterpreter(fx.Interpreter):
    """An interpreter that can :meth:`prepare` a node to be run, and run again, alone.

    ``device``: where every value lives when that is not where the recording says (fake tensors), else None.
    """

    def __init__(self, module: nn.Module, *, graph: fx.Graph, device: torch.device | None = None) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False
        self._device = device

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module; without values, a layer with a packed weight that needs some is that of `quantised_linear`."""
        try:
            return super().call_module(target, args, kwargs)
        except Exception:
            if self._device is None or not is_quantised(module := self.fetch_attr(str(target))):
                raise
        return quantised_linear(module, *args, **kwargs)

    def prepare(self, node: fx.Node, *, private: bool = False) -> Invocation:
        """Return the node with its arguments; ``private`` copies the values that it may change in place."""
        leaves: dict[int, torch.Tensor] = {}
        lent: list[_Lent] = []

        def value_of(operand: fx.Node) -> Any:
            value = self.env[operand]
            info: TracedNode | None = operand.meta.get(INFO)
            if info is not None and info.mutated:
                value = pytree.tree_map_only(torch.Tensor, lambda t: self._lend(t, leaves, lent, private), value)
            elif isinstance(value, nn.Module):
                _add_leaves(leaves, value.parameters())
            else:
                _add_leaves(leaves, tensors_of(value))
            return value

        args, kwargs = self.arguments(node, value_of)
        if node.op == "call_module":
            _add_leaves(leaves, self.fetch_attr(str(node.target)).parameters())

        def run() -> Any:
            return getattr(self, node.op)(node.target, args, kwargs)

        return Invocation(run, tuple(leaves.values()), tuple(lent))

    def arguments(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
        """Return the arguments of a node, given the values of its operands; its device is that of this interpreter."""

        def load(argument: Any) -> Any:
            if isinstance(argument, torch.device) and self._device is not None:
                return self._device
            return value_of(argument) if isinstance(argument, fx.Node) else argument

        args: Any = fx.node.map_aggregate(node.args, load)
        kwargs: Any = dict(fx.node.map_aggregate(node.kwargs, load))
        if self._device is not None and kwargs.get("device") is not None:
            kwargs["device"] = self._device
        return args, kwargs

    def _lend(
        self, value: torch.Tensor, leaves: dict[int, torch.Tensor], lent: list[_Lent], private: bool
    ) -> torch.Tensor:
        if private:
            value = value.detach().clone().requires_grad_(value.requires_grad)
        if value.requires_grad and torch.is_grad_enabled():
            _add_leaves(leaves, (value,))
            alias = _Alias.apply(value)
        else:
            alias = value.detach()
        lent.append(_Lent(value, alias, alias._version))
        return alias


def epilogue_nodes(traced: TracedGraph) -> frozenset[fx.Node]:
    """Return the ``full`` nodes and everything that is computed from them, outputs excluded."""
    epilogue: set[fx.Node] = set()
    for node in traced.graph.nodes:
        info = node.meta.get(INFO)
        full = info is not None and info.node_class is NodeClass.FULL
        if node.op not in ("placeholder", "output") and (full or not epilogue.isdisjoint(node.all_input_nodes)):
            epilogue.add(node)
    return frozenset(epilogue)


def alias(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one on the same storage that an operation may change in place."""
    aliased: torch.Tensor = _Alias.apply(value) if value.requires_grad else value.detach()
    return aliased


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, flat."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Picks):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    leaves = pytree.tree_leaves(value)
    return [tensor for leaf in leaves if isinstance(leaf, (torch.Tensor, Picks)) for tensor in tensors_of(leaf)]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _add_leaves(leaves: dict[int, torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.requires_grad:
            leaves.setdefault(id(tensor), tensor)
