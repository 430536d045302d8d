"""How a model's own loss is made of sums over rows.

    labels ──────────────► class_weights on the whole batch, up front: what the mean divides by
    logits ─► ... ─► each ─► rows [rows, 2] ─► ratio ─► / items ─► + 0.1 * other ─► loss
              microbatch by microbatch         the light rest: a sum over rows, and what is linear in it

The recording keeps a loss as values per row and a light rest (:mod:`autosplit.trace.reductions.decompose`). Where the
rest is linear in the sums over the rows, each microbatch can add its part of the loss, and the step runs in its
schedule. Where it is not (a product of means, as in a routing loss), only the whole batch gives the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autosplit.errors import InputError
from autosplit.trace.graph import INFO, NodeClass, TracedGraph
from autosplit.trace.reductions import decompose
from autosplit.trace.rows.kinds import arguments, function_of

_LINEAR = frozenset("add sub neg to float double clone contiguous iadd radd rsub".split())
_SCALED = frozenset("mul rmul imul multiply div truediv true_divide divide".split())


def own_loss(output: Any) -> torch.Tensor:
    """Return the loss in a model's output: what is called "loss", or else the first scalar.

    Raises InputError when there is none.
    """
    loss: Any = None
    if isinstance(output, torch.Tensor):
        loss = output
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        loss = output.loss
    elif isinstance(output, (tuple, list)):
        loss = next((item for item in output if isinstance(item, torch.Tensor) and item.dim() == 0), None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    raise InputError(
        f"train_step needs loss_fn=, a function loss_fn(output, target) that returns a scalar: the model returns a "
        f"{type(output).__name__} without a loss of its own (a scalar 'loss', or a scalar in a tuple; does it want "
        "labels?)"
    )


@dataclass(frozen=True)
class Half:
    """A sum over rows: its kind, what the rows give, and for a ratio what decides its divisor."""

    kind: str
    rows: fx.Node
    target: Any = None
    ignore_index: int = -100
    weight: Any = None


class _LossRefused(Exception):
    """Why only the whole batch gives a loss."""


class Form:
    """How a loss is made: ``halves`` are sums over rows, the ``chain`` is linear in them.

    Attributes:
        why: why only the whole batch gives the loss; None where microbatches do.
        fixed: what is computed on the whole batch before the step, operands first.
    """

    def __init__(self, traced: TracedGraph, loss: fx.Node) -> None:
        self.root = traced.root
        self.loss = loss
        self.halves: dict[fx.Node, Half] = {}
        self.chain: list[fx.Node] = []
        self.fixed: list[fx.Node] = []
        self.why: str | None = None
        self.nodes = list(traced.graph.nodes)
        self._parameters = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
        try:
            for node, info in traced.compute_nodes():
                if info.node_class is NodeClass.FULL:
                    _check_pure(node)
            self._linear(loss)
        except _LossRefused as refusal:
            self.why = str(refusal)

    def _linear(self, node: fx.Node) -> None:
        """Take a node that is linear in sums over rows; raise _LossRefused for any other."""
        if node in self.halves or node in self.chain:
            return
        info = node.meta.get(INFO)
        if info is None or info.node_class is not NodeClass.FULL or len(info.tensors) != 1 or info.tensors[0].shape:
            raise _LossRefused(f"{_name(node)} is no scalar that rows add up to")
        half = self._half(node)
        if half is not None:
            self.halves[node] = half
            return
        operands = [a for a in arguments(node) if isinstance(a, fx.Node)]
        varying = [a for a in operands if self._varies(a)]
        name = str(getattr(function_of(node, self.root), "__name__", "")).strip("_")
        numbers = any(isinstance(a, (int, float)) and not isinstance(a, bool) for a in arguments(node))
        adds = name in _LINEAR and varying == operands and not numbers
        scales = (
            name in _SCALED
            and len(varying) == 1
            and (not name.startswith(("div", "true")) or arguments(node)[0] is varying[0])
        )
        if not (adds or scales) or not varying or node.kwargs or not info.tensors[0].differentiable:
            raise _LossRefused(f"{_name(node)} is not linear in the rows")
        for operand in node.all_input_nodes:
            if operand in varying:
                self._linear(operand)
            else:
                self._fix(operand)
        self.chain.append(node)

    def _half(self, node: fx.Node) -> Half | None:
        """Return a sum or mean over rows; None for another node."""
        function, args = function_of(node, self.root), arguments(node)
        kind = next((n for n in ("ratio", "total", "average") if function is getattr(decompose, n)), None)
        if kind is None:
            return None
        rows = args[0]
        info = rows.meta.get(INFO) if isinstance(rows, fx.Node) else None
        if info is None or info.node_class is not NodeClass.MICRO or rows.op == "placeholder":
            raise _LossRefused(f"{_name(node)} takes no values of the rows")
        if kind != "ratio":
            return Half(kind, rows)
        _, target, _, _, ignore_index, _, weight = arguments(rows)
        for operand in (target, weight):
            if isinstance(operand, fx.Node):
                self._fix(operand)
        return Half(kind, rows, target, ignore_index, weight)

    def _varies(self, node: fx.Node) -> bool:
        """Tell whether a node depends on anything that is trained."""
        return any(
            (n.op == "get_attr" and n.target in self._parameters)
            or (INFO in n.meta and not self._parameters.isdisjoint(n.meta[INFO].reads))
            for n in _behind(node)
        )

    def _fix(self, node: fx.Node) -> None:
        """Take an operand that the batch gives without the model's parameters."""
        behind = _behind(node)
        if self._varies(node):
            raise _LossRefused(f"{_name(node)} is known only behind the model's layers")
        for operand in behind:
            _check_pure(operand)
        behind |= set(self.fixed)
        self.fixed = [operand for operand in self.nodes if operand in behind]


def form_of(traced: TracedGraph) -> Form:
    """Return how the loss that a recorded model returns is made; raise InputError when it returns none."""
    return Form(traced, loss_node(traced))


def loss_node(traced: TracedGraph) -> fx.Node:
    """Return the loss that a recorded model returns; raise InputError when it returns none."""
    nodes = next(iter(reversed(traced.graph.nodes))).args[0]
    leaves: list[Any] = []
    for node in nodes if isinstance(nodes, (tuple, list)) else ():
        tensor = node.meta[INFO].tensors[0] if isinstance(node, fx.Node) and INFO in node.meta else None
        leaves.append(node if tensor is None else torch.empty(tensor.shape_at(2), dtype=tensor.dtype, device="meta"))
    wanted = own_loss(traced.unflatten(leaves))
    loss: fx.Node = nodes[next(index for index, leaf in enumerate(leaves) if leaf is wanted)]
    return loss


def note_on_loss(traced: TracedGraph) -> str | None:
    """Return what a plan should say about a loss that the model returns: that it needs the whole batch, and why."""
    try:
        why = form_of(traced).why
    except InputError:
        return None
    return why and (
        f"the model's own loss needs the whole batch ({why}): train_step without loss_fn runs all forwards, then the "
        "loss, then all backwards, whatever the schedule"
    )


def _behind(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it depends on."""
    behind, todo = {node}, [node]
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand not in behind:
                behind.add(operand)
                todo.append(operand)
    return behind


def _check_pure(node: fx.Node) -> None:
    info = node.meta.get(INFO)
    if info is not None and (info.writes or info.random or info.mutated):
        raise _LossRefused(f"{info.name} draws, or changes a value in place, once per batch")


def _name(node: fx.Node) -> str:
    return str(node.meta[INFO].name) if INFO in node.meta else node.name
