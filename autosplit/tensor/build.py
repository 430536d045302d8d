"""A rank's own graph of a planned recording: parts of parameters, collectives where values move, sizes of parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autosplit.tensor.axes import Shard
from autosplit.tensor.collectives import Move, Placement, local_part
from autosplit.tensor.facts import Operand, operand_of
from autosplit.tensor.local import Stateless, embedding_rows, is_table, local_arguments, run_module
from autosplit.tensor.plan import NodePlan, Placements, TensorPlan
from autosplit.tensor.ways import REPLICATED
from autosplit.trace.graph import INFO, TracedGraph
from autosplit.trace.rows.kinds import function_of


def rank_graph(
    traced: TracedGraph, plan: TensorPlan, *, group: dist.ProcessGroup | None = None, rank: int | None = None
) -> fx.GraphModule:
    """Return the module that runs a recording on one rank of a group; it has the model's own names for its parts."""
    return _Builder(traced, plan, group, dist.get_rank(group) if rank is None else rank).built()


class _Builder:
    def __init__(self, traced: TracedGraph, plan: TensorPlan, group: Any, rank: int) -> None:
        self.traced, self.plan, self.group, self.rank = traced, plan, group, rank
        self.root: dict[str, Any] = {}
        self.graph = fx.Graph()
        self._at: dict[tuple[Operand, Placements], fx.Node] = {}
        self._parts: dict[int, nn.Parameter] = {}
        self._shapes: dict[Operand, list[torch.Size]] = {}

    def built(self) -> fx.GraphModule:
        """Copy the nodes one by one."""
        for node in self.traced.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.node.map_arg(node.args[0], self._whole))
            elif node.op == "get_attr":
                self._enter(node, self._attribute(str(node.target)))
            elif node.name in self.plan.nodes:
                self._enter(node, self._run(node, self.plan.nodes[node.name]))
            else:
                self._enter(node, self._copied(node))
        module = fx.GraphModule(self.root, self.graph, class_name="RankGraph")
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
        module.recompile()
        self._name(module)
        return module

    def _name(self, module: fx.GraphModule) -> None:
        """Give the module the names of parameters that its graph does not read."""
        for name, parameter in self.traced.root.named_parameters(remove_duplicate=False):
            path, _, last = name.rpartition(".")
            holder: nn.Module = module
            for part in path.split(".") if path else ():
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            if last not in holder._parameters:
                holder.register_parameter(last, self._part(parameter, self.plan.parameters[name]))

    def _enter(self, node: fx.Node, made: fx.Node) -> None:
        made.meta = dict(node.meta)
        self._at[operand_of(node), self._placed(operand_of(node))] = made

    def _placed(self, key: Operand) -> Placements:
        """Return how a value lies where it is made."""
        if key in self.plan.nodes:
            return self.plan.nodes[key].gives
        return (self.plan.parameters.get(key.removeprefix("."), REPLICATED),) if key.startswith(".") else (REPLICATED,)

    # -- values --------------------------------------------------------------------------------------------------------
    def _attribute(self, target: str) -> fx.Node:
        path, _, name = target.rpartition(".")
        value: Any = getattr(self.traced.root.get_submodule(path) if path else self.traced.root, name)
        if isinstance(value, nn.Parameter):
            value = self._part(value, self.plan.parameters.get(target, REPLICATED))
        self.root[target] = value
        return self.graph.get_attr(target)

    def _part(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        if id(parameter) not in self._parts:
            part = local_part(parameter.detach(), placement, self.rank, self.plan.ranks)
            part = parameter if part is parameter else nn.Parameter(part, requires_grad=parameter.requires_grad)
            self._parts[id(parameter)] = part
        return self._parts[id(parameter)]

    def _whole(self, node: fx.Node) -> fx.Node:
        return self._value(operand_of(node), (REPLICATED,) * max(len(self._placed(operand_of(node))), 1))

    def _value(self, key: Operand, want: Placements) -> fx.Node:
        """Return a value as it is wanted, moved where it lies otherwise."""
        own = self._placed(key)
        if (key, want) not in self._at:
            if own == want or want == (REPLICATED,) * len(want) == own:
                return self._at[key, own]
            (source,), (target,) = own, want
            shape = self._shape(key)
            shard = source if isinstance(source, Shard) else target
            width = shape[shard.dim] if isinstance(shard, Shard) else 0
            name = f"move_{len(self.root)}"
            self.root[name] = Move(source, target, self.group, width=width)
            moved = self.graph.call_module(name, (self._at[key, own],))
            self._at[key, want] = moved
        return self._at[key, want]

    def _shape(self, key: Operand) -> list[int]:
        if key.startswith("."):
            path, _, name = key[1:].rpartition(".")
            return [*getattr(self.traced.root.get_submodule(path), name).shape]
        node = next(node for node in self.traced.graph.nodes if node.name == key)
        return [*node.meta[INFO].tensors[0].shape_at(self.plan.rows)]

    # -- nodes ---------------------------------------------------------------------------------------------------------
    def _copied(self, node: fx.Node) -> fx.Node:
        if node.op == "call_module":
            self.root[str(node.target)] = self.traced.root.get_submodule(str(node.target))
        return self.graph.node_copy(node, self._whole)

    def _run(self, node: fx.Node, plan: NodePlan) -> fx.Node:
        def value(operand: fx.Node) -> fx.Node:
            key = operand_of(operand)
            return self._value(key, plan.wants.get(key, self._placed(key)))

        first = next(iter(node.all_input_nodes), None)
        source = self._first_shard(plan, operand_of(first)) if first is not None else None
        result = next((p for p in plan.gives if isinstance(p, Shard)), None)
        ndim = len(self._shape(operand_of(first))) if first is not None and source is not None else 0
        args, kwargs = local_arguments(
            node, self.traced.root, ndim=ndim, source=source, result=result, ranks=self.plan.ranks
        )
        if is_table(node, self.traced.root) and self._rows_are_cut(node, plan):
            return self._table(node, plan, args, kwargs, value)
        args, kwargs = fx.node.map_arg((args, kwargs), value)
        if node.op == "call_module":
            return self._module(node, plan, args, kwargs)
        return self.graph.create_node(node.op, node.target, args, kwargs)

    @staticmethod
    def _first_shard(plan: NodePlan, key: Operand) -> Shard | None:
        return next((p for p in plan.wants.get(key, ()) if isinstance(p, Shard)), None)

    def _module(self, node: fx.Node, plan: NodePlan, args: Any, kwargs: Any) -> fx.Node:
        """Call a module as it is where its parameters are whole, else on what lies here of them."""
        target = str(node.target)
        module = self.traced.root.get_submodule(target)
        names = [name for name, _ in module.named_parameters()]
        moved = {name: (f".{target}.{name}", plan.wants[f".{target}.{name}"]) for name in names}
        if all(self._placed(key) == want == (REPLICATED,) for key, want in moved.values()):
            self.root[target] = module
            return self.graph.call_module(target, args, kwargs)
        state = {}
        for name, (key, want) in moved.items():
            if (key, self._placed(key)) not in self._at:
                self._at[key, self._placed(key)] = self._attribute(f"{target}.{name}")
            state[name] = self._value(key, want)
        held = f"module_{len(self.root)}"
        self.root[held] = Stateless(module)
        return self.graph.call_function(run_module, (self.graph.get_attr(held), state, *args), kwargs)

    # -- tables --------------------------------------------------------------------------------------------------------
    def _table_key(self, node: fx.Node) -> Operand:
        return f".{node.target}.weight" if node.op == "call_module" else operand_of(node.args[1])  # type: ignore[arg-type]

    def _rows_are_cut(self, node: fx.Node, plan: NodePlan) -> bool:
        (placement,) = plan.wants[self._table_key(node)]
        return isinstance(placement, Shard) and placement.dim == 0

    def _table(self, node: fx.Node, plan: NodePlan, args: Any, kwargs: Any, value: Any) -> fx.Node:
        key = self._table_key(node)
        if node.op == "call_module" and (key, self._placed(key)) not in self._at:
            self._at[key, self._placed(key)] = self._attribute(key[1:])
        table = self._value(key, plan.wants[key])
        (shard,) = plan.wants[key]
        assert isinstance(shard, Shard)
        function = function_of(node, self.traced.root)
        padding = function.padding_idx if isinstance(function, nn.Embedding) else kwargs.get("padding_idx")
        first = shard.indices(self.rank, self.plan.ranks)[0].start
        return self.graph.call_function(embedding_rows, (value(args[0]), table, first, padding))
