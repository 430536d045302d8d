"""A rank's own graph of a planned recording: parts of parameters, collectives where values move, sizes of parts."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import fx, nn

from autosplit.tensor.axes import Shard
from autosplit.tensor.collectives import Move, Placement, Sharing
from autosplit.tensor.entropy import CrossEntropyInParts, class_loss_of
from autosplit.tensor.facts import Operand, operand_of
from autosplit.tensor.local import (
    DropoutInPart,
    Lookup,
    Stateless,
    embedding_rows,
    is_dropout,
    linear_of,
    local_arguments,
    lookup_of,
    run_module,
)
from autosplit.tensor.plan import NodePlan, Placements, TensorPlan
from autosplit.tensor.products import GatheredProducts
from autosplit.tensor.ways import REPLICATED
from autosplit.trace.graph import INFO, NodeClass, Size, TensorInfo, TracedGraph, TracedNode
from autosplit.trace.inputs.objects import storage_key
from autosplit.trace.rows.kinds import function_of

MOVES = "tensor_parallel"
"""The attribute of a recording's root that holds the moves, and what else has collectives."""


def rank_recording(
    traced: TracedGraph, plan: TensorPlan, sharing: Sharing, *, plain_numbers: bool = True
) -> TracedGraph:
    """Return the recording of what one of several ranks runs, for parameters that hold its parts.

    Nodes keep their names; moves are nodes of their own. ``plain_numbers``: random nodes get their part of numbers that
    are drawn before; else they draw them.
    """
    return _Builder(traced, plan, sharing, plain_numbers).built()


class _Builder:
    def __init__(self, traced: TracedGraph, plan: TensorPlan, sharing: Sharing, plain_numbers: bool) -> None:
        self.traced, self.plan, self.sharing, self.rank = traced, plan, sharing, sharing.rank
        self._plain_numbers = plain_numbers
        self.root = nn.Module()
        self.root.__dict__.update(traced.root.__dict__)
        self.graph = fx.Graph()
        self._at: dict[tuple[Operand, Placements], fx.Node] = {}
        self._nodes = {node.name: node for node in traced.graph.nodes}
        self._calls: dict[str, fx.Node] = {}
        """What makes the products that values are gathered for."""
        self._written = {storage_key(value) for value in map(self._state, traced.written) if value is not None}

    def built(self) -> TracedGraph:
        """Copy the nodes one by one."""
        for node in self.traced.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.node.map_arg(node.args[0], self._whole))
            elif node.op != "get_attr" or not isinstance(self._state(str(node.target)), nn.Parameter):
                planned = self.plan.nodes.get(node.name)
                copy = self._copied(node) if planned is None else self._run(node, planned)
                copy.meta = dict(node.meta)
                self._at[operand_of(node), self._placed(operand_of(node))] = copy
                if planned is not None and INFO in copy.meta:
                    copy.meta[INFO] = self._info(node, planned)
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
        reads = Counter(str(node.target) for node in self.graph.nodes if node.op == "get_attr")
        trained = dict(self.traced.root.named_parameters(remove_duplicate=False))
        tied = [name for name, count in reads.items() if count > 1 and (name in trained or name in self.traced.tied)]
        return replace(self.traced, graph=self.graph, root=self.root, tied=tuple(tied))

    def _info(self, node: fx.Node, plan: NodePlan) -> TracedNode:
        """Return what is known of a node, with the sizes that its results have here."""
        info: TracedNode = node.meta[INFO]
        if node.name in self._calls:
            info = replace(info, reads=(), colocation_group=self._calls[node.name].meta[INFO].colocation_group)
        shards = [shard for shard in plan.gives if isinstance(shard, Shard)]
        if not shards:
            return info
        ranks = self.plan.ranks
        tensors = [_local(tensor, shard, ranks) for tensor, shard in zip(info.tensors, plan.gives, strict=True)]
        drawn = (shards[0].dim, tuple(shards[0].indices(self.rank, ranks))) if info.random else None
        return replace(info, tensors=tuple(tensors), part=drawn)

    def _state(self, target: str) -> Any:
        return attrgetter(target)(self.traced.root)

    def _placed(self, key: Operand) -> Placements:
        """Return how a value lies where it is made."""
        if key in self.plan.nodes:
            return self.plan.nodes[key].gives
        return (self.plan.parameters.get(key.removeprefix("."), REPLICATED),) if key.startswith(".") else (REPLICATED,)

    # -- values --------------------------------------------------------------------------------------------------------
    def _whole(self, node: fx.Node) -> fx.Node:
        return self._value(operand_of(node), (REPLICATED,) * max(len(self._placed(operand_of(node))), 1))

    def _value(self, key: Operand, want: Placements) -> fx.Node:
        """Return a value as it is wanted, moved where it lies otherwise."""
        current = self._placed(key)
        moves = current != want and not want == (REPLICATED,) * len(want) == current
        if not moves and key.startswith(".") and isinstance(self._state(key[1:]), nn.Parameter):
            # each use is one of its own, as in the recording
            return self.graph.create_node("get_attr", key[1:], name=f"{MOVES}_parameter")
        if not moves:
            return self._at[key, current]
        if (key, want) not in self._at or self._changes(key):
            self._at[key, want] = self._moved(key, current, want)
        return self._at[key, want]

    def _changes(self, key: Operand) -> bool:
        """Tell whether some node changes a value in place: what was moved before is not the value behind it."""
        if key in self._nodes:
            info: TracedNode | None = self._nodes[key].meta.get(INFO)
            return info is not None and (info.mutated or bool(info.rewritten))
        return storage_key(self._state(key[1:])) in self._written

    def _moved(self, key: Operand, current: Placements, want: Placements) -> fx.Node:
        (source,), (target,) = current, want
        info = self._info_of(key)
        (tensor,) = info.tensors
        moving = self._held(Move(source, target, self.sharing))
        moved = self.graph.create_node(
            "call_module", moving, (self._value(key, current),), name=moving.replace(".", "_")
        )
        if isinstance(target, Shard):
            tensor = _local(tensor, target, self.plan.ranks)
        moved.meta[INFO] = replace(info, name=f"{target} of {info.name}", tensors=(tensor,))
        return moved

    def _held(self, module: nn.Module) -> str:
        """Return the name that a module for this rank gets."""
        modules = self.root.__dict__.setdefault(MOVES, nn.Module())
        number = len(modules._modules)
        modules.add_module(str(number), module)
        return f"{MOVES}.{number}"

    def _info_of(self, key: Operand) -> TracedNode:
        """Return what is known of a value, as of a node that only moves it."""
        if key in self._nodes and INFO in self._nodes[key].meta:
            info: TracedNode = self._nodes[key].meta[INFO]
            return TracedNode(info.name, info.module, info.node_class, info.tensors, source=info.source)
        value = self._state(key[1:])
        tensor = TensorInfo(tuple(Size(0, size) for size in value.shape), value.dtype)
        return TracedNode(key[1:], "", NodeClass.SHARED, (tensor,), reads=(key[1:],))

    # -- nodes ---------------------------------------------------------------------------------------------------------
    def _copied(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole)
        return self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _run(self, node: fx.Node, plan: NodePlan) -> fx.Node:
        def value(operand: fx.Node) -> fx.Node:
            key = operand_of(operand)
            return self._value(key, plan.wants.get(key, self._placed(key)))

        first = next(iter(node.all_input_nodes), None)
        wanted = plan.wants.get(operand_of(first), ()) if first is not None else ()
        source = next((p for p in wanted if isinstance(p, Shard)), None)
        result = next((p for p in plan.gives if isinstance(p, Shard)), None)
        ndim = len(self._info_of(operand_of(first)).tensors[0].shape) if first is not None and source is not None else 0
        args, kwargs = local_arguments(
            node, self.traced.root, ndim=ndim, source=source, result=result, ranks=self.plan.ranks
        )
        lookup = lookup_of(node, self.traced.root)
        rows = self._table(node, plan, lookup, value) if lookup is not None else None
        if rows is not None:
            return rows
        if plan.sums and (loss := class_loss_of(node)) is not None:
            classes = self._info_of(operand_of(loss.logits)).tensors[0].shape[1].constant
            inside = self._held(CrossEntropyInParts(loss, classes, self.sharing))
            given = tuple(value(operand) for operand in (loss.logits, loss.target, loss.weight) if operand is not None)
            return self.graph.create_node("call_module", inside, given, name=node.name)
        for key, names in self.plan.gathered.items():
            if node.name in names:
                call = self._calls.get(node.name) or self._products(key, names)
                return self.graph.call_function(operator.getitem, (call, names.index(node.name)), name=node.name)
        args, kwargs = fx.node.map_arg((args, kwargs), value)
        if result is not None and not self._plain_numbers and is_dropout(node, self.traced.root):
            dim, runs = result.dim, result.indices(self.rank, self.plan.ranks)
            size = sum(count * length for count, length in result.pieces)
            inside = self._held(DropoutInPart(function_of(node, self.traced.root), dim, runs, size))
            return self.graph.create_node("call_module", inside, args, kwargs, name=node.name)
        if node.op == "call_module":
            return self._module(node, plan, args, kwargs)
        return self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _module(self, node: fx.Node, plan: NodePlan, args: Any, kwargs: Any) -> fx.Node:
        """Call a module as it is where its parameters are whole, else on what lies here of them."""
        target = str(node.target)
        module = self.traced.root.get_submodule(target)
        names = [name for name, _ in module.named_parameters()]
        moved = {name: (f".{target}.{name}", plan.wants[f".{target}.{name}"]) for name in names}
        if all(self._placed(key) == want == (REPLICATED,) for key, want in moved.values()):
            return self.graph.create_node("call_module", target, args, kwargs, name=node.name)
        state = {name: self._value(key, want) for name, (key, want) in moved.items()}
        held = f"{MOVES}_{node.name}"
        self.root.__dict__[held] = Stateless(module)
        arguments = (self.graph.get_attr(held), state, *args)
        return self.graph.create_node("call_function", run_module, arguments, kwargs, name=node.name)

    def _products(self, key: Operand, names: Sequence[str]) -> fx.Node:
        """Make the products that a value is gathered for in one call, which stays on one stage."""
        layers, state, infos = [], [], []
        for name in names:
            node, plan = self._nodes[name], self.plan.nodes[name]
            linear = linear_of(node, self.traced.root)
            assert linear is not None
            layers.append(linear.layer)
            state += [None if k is None else self._value(k, plan.wants[k]) for k in (linear.weight, linear.bias)]
            infos.append(self._info(node, plan))
        (source,), group = self._placed(key), -1 - len(self._calls)  # those of a recording are not negative
        target = self._held(GatheredProducts(source, self.sharing, layers))
        call = self.graph.call_module(target, (self._value(key, (source,)), *state))
        call.meta[INFO] = replace(
            infos[0],
            name=f"products of {self._info_of(key).name}",
            tensors=tuple(tensor for info in infos for tensor in info.tensors),
            reads=tuple(dict.fromkeys(read for info in infos for read in info.reads)),
            colocation_group=group,
        )
        self._calls |= dict.fromkeys(names, call)
        return call

    # -- tables --------------------------------------------------------------------------------------------------------
    def _table(self, node: fx.Node, plan: NodePlan, lookup: Lookup, value: Any) -> fx.Node | None:
        """Look up rows in a part of a table; None where the rank has all rows."""
        key = f".{node.target}.weight" if lookup.table is None else operand_of(lookup.table)
        (shard,) = plan.wants[key]
        if not isinstance(shard, Shard) or shard.dim != 0:
            return None
        ((_, total),) = shard.pieces
        first = shard.indices(self.rank, self.plan.ranks)[0].start
        arguments = (value(lookup.tokens), self._value(key, (shard,)), first, total, lookup.padding)
        return self.graph.create_node("call_function", embedding_rows, arguments, name=node.name)


def _local(tensor: TensorInfo, placement: Placement, ranks: int) -> TensorInfo:
    """Return what is known of a rank's part of a tensor."""
    if not isinstance(placement, Shard):
        return tensor
    size = tensor.shape[placement.dim]
    local = Size(0, size.constant // ranks)
    return replace(tensor, shape=(*tensor.shape[: placement.dim], local, *tensor.shape[placement.dim + 1 :]))
