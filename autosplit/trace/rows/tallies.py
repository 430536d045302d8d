"""Counters: sums over rows that are added to a buffer, such as ``self.count += mask.sum(0)``.

    microbatch 0    mask.sum(0) ─┐
    microbatch 1    mask.sum(0) ─┼─► added up ─► one update of the buffer, behind the last forward
    microbatch 2    mask.sum(0) ─┘

The sum over all rows is that of the microbatches' sums, so such a node needs no merged batch, and runs in its stage.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace.graph import INFO, LENGTH
from autosplit.trace.recording.recording import apply_function, invoke
from autosplit.trace.rows.kinds import called, counts_by_microbatch

_ADDING = frozenset("add_ iadd sub_ isub".split())
_ADDING_AT = frozenset("index_add_ scatter_add_".split())
_SUMMING = frozenset("sum nansum count_nonzero bincount total".split())
"""What sums over rows: torch's, and what adds up the rows' parts of a sum that was taken apart."""
_LINEAR = frozenset(
    "to type type_as float double half bfloat16 int long view reshape flatten squeeze unsqueeze detach clone "
    "contiguous neg".split()
)


def tallies(graph: fx.Graph, root: nn.Module) -> set[fx.Node]:
    """Return the nodes that add sums over rows to a buffer in place, and whose result only such nodes take."""
    sums: dict[fx.Node, Any] = {}
    """Of each what it adds to: the buffer, or the result of another one."""
    for node in graph.nodes:
        if INFO in node.meta and node.meta[INFO].writes and _is_tally(node, root, sums):
            sums[node] = called(node, root)[1][0]
    size = -1
    while size != len(sums):
        size = len(sums)
        kept = [n for n, to in sums.items() if n.users.keys() <= sums.keys() and (to.op == "get_attr" or to in sums)]
        sums = {node: sums[node] for node in kept}
    return set(sums)


def tallied_with(graph: fx.Graph, root: nn.Module) -> Iterator[tuple[fx.Node, ...]]:
    """Yield the nodes of one forward that are the only readers of buffers of a module with such a counter.

    Code that balances experts reads the counter and changes another buffer, so they belong on one device.
    """
    readers: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for name in node.meta[INFO].reads if INFO in node.meta else ():
            readers.setdefault(name, []).append(node)
    for node in filter(counts_by_microbatch, tallies(graph, root)):
        module = node.meta[INFO].module
        near = [nodes[0] for name, nodes in readers.items() if len(nodes) == 1 and name.rpartition(".")[0] == module]
        alike = [other for other in near if other.op != "call_module" and other.meta[INFO].module == module]
        if module and len(alike) > 1:
            yield tuple(alike)


def _is_tally(node: fx.Node, root: nn.Module, before: Collection[fx.Node]) -> bool:
    """Tell whether a node adds a sum over rows to a buffer, or to what such nodes ``before`` have made of it."""
    name, args = called(node, root)
    if node.target in (invoke, apply_function) or len(args) < 2 or not isinstance(args[0], fx.Node):
        return False
    if (args[0].target,) != node.meta[INFO].writes and args[0] not in before:
        return False
    others = [operand for operand in node.all_input_nodes if operand is not args[0] and operand.op != "get_attr"]
    if name in _ADDING:
        return others == [args[1]] and _adds_up(args[1], root)
    dims = {operand.meta[INFO].tensors[0].batch_dim if INFO in operand.meta else None for operand in others}
    return name in _ADDING_AT and len(others) == 2 and dims == {args[1]}


def _adds_up(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a value is a sum over rows: of all it is the sum of what parts give."""
    operands = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
    if INFO not in node.meta:
        rows = node.op == "placeholder" and LENGTH not in node.meta
        return rows or (node.target is operator.mul and len(operands) == 1 and _adds_up(operands[0], root))
    name = called(node, root)[0]
    outs, taken = node.meta[INFO].tensors, [t for o in operands if INFO in o.meta for t in o.meta[INFO].tensors]
    if node.target in (invoke, apply_function) or len(outs) != 1 or outs[0].batch_dim is not None or not taken:
        return False
    if name in _SUMMING:
        return all(tensor.batch_dim is not None for tensor in taken)
    exact = outs[0].dtype.is_floating_point or not taken[0].dtype.is_floating_point
    return (
        name in _LINEAR and len(operands) == 1 and exact and outs[0].dtype != torch.bool and _adds_up(operands[0], root)
    )
