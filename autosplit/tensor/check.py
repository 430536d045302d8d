"""Whether a node gives parts of its results when it runs on parts of its operands: tried on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from autosplit.profile.node_costs.flops import flat_tensors
from autosplit.tensor.axes import Axis, Shard, shard_if_any
from autosplit.tensor.facts import Facts, NodeFacts, operand_of
from autosplit.tensor.follow import Follower, KernelsAsOne
from autosplit.tensor.local import local_arguments, local_shape, lookup_of
from autosplit.tensor.rules import rules
from autosplit.tensor.ways import Way
from autosplit.trace.graph import INFO, ROWS, evaluate


def runs(facts: Facts, root: nn.Module, node: NodeFacts, strategy: Way, ranks: int) -> bool:
    """Run a node on parts of the shapes that a way gives them, and compare its results' shapes."""
    axis = strategy.axis
    assert axis is not None
    lookup = lookup_of(node.node, root)
    if lookup is not None:
        table = operand_of(lookup.table) if lookup.table is not None else f".{node.node.target}.weight"
        shard = _shard(facts, node.operands[table][0], axis)
        return shard is None or shard.dim != 0 or shard.plain
    try:
        return _shapes(facts, root, node, axis, ranks) == [
            local_shape(facts.tensors[key].shape, _shard(facts, key, axis) if strategy.gives is axis else None, ranks)
            for key in node.results
        ]
    except Exception:  # whatever an operation raises for sizes that do not fit: it does not run so
        return False


def draws_in_parts(facts: Facts, node: NodeFacts, axis: Axis) -> bool:
    """Tell whether a node's numbers, drawn for the whole batch, have parts as its results have them.

    So it is where they have the dimensions of its result, up to the one that is sharded.
    """
    info = node.node.meta[INFO]
    shards = [_shard(facts, key, axis) for key in node.results]
    shard = shards[0]
    if len(shards) != 1 or shard is None:
        return False
    sizes = {**facts.lengths, ROWS: facts.rows}
    until = shard.dim + 1
    whole = [*facts.tensors[node.results[0]].shape[:until]]
    return all([evaluate(size, sizes) for size in draw.out.shape[:until]] == whole for draw in info.draws or ())


def _shard(facts: Facts, key: int, axis: Axis) -> Shard | None:
    return shard_if_any(facts.dims[key], axis)


def _shapes(facts: Facts, root: nn.Module, node: NodeFacts, axis: Axis, ranks: int) -> list[list[int]]:
    def part(tensor: Tensor) -> Tensor:
        shard = _shard(facts, id(tensor), axis)
        if shard is None:
            return tensor
        return torch.empty(local_shape(tensor.shape, shard, ranks), dtype=tensor.dtype, device=tensor.device)

    def value(operand: fx.Node) -> Any:
        return fx.node.map_aggregate(
            facts.values[operand_of(operand)], lambda v: part(v) if isinstance(v, Tensor) else v
        )

    call = node.node
    follower = Follower(rules())
    with facts.fake, torch.no_grad():
        args, kwargs = arguments_of(facts, root, node, axis, ranks)
        args, kwargs = fx.node.map_arg((args, kwargs), value)
        with follower, KernelsAsOne(follower):
            if call.op == "call_module":
                state = {
                    key.removeprefix(f".{call.target}."): part(facts.values[key])
                    for key in node.operands
                    if key.startswith(f".{call.target}.")
                }
                result = functional_call(root.get_submodule(str(call.target)), state, args, kwargs)
            else:
                called: Any = getattr(torch.Tensor, str(call.target)) if call.op == "call_method" else call.target
                result = called(*args, **kwargs)
    return [list(tensor.shape) for tensor in flat_tensors(result)]


def arguments_of(facts: Facts, root: nn.Module, node: NodeFacts, axis: Axis, ranks: int) -> Any:
    """Return a node's arguments on a rank."""
    first = next((key for keys in node.operands.values() for key in keys), None)
    tensor = facts.tensors[first] if first is not None else None
    return local_arguments(
        node.node,
        root,
        ndim=tensor.ndim if tensor is not None else 0,
        source=_shard(facts, first, axis) if first is not None else None,
        result=_shard(facts, node.results[0], axis),
        ranks=ranks,
    )
