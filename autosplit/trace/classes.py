"""Which nodes run once before the microbatches, once per microbatch, or once on merged values.

    shared   depends neither on a batched input nor on the number of rows
    micro    depends on the batch, rows independent
    full     mixes rows in a way that reaches an output or a buffer, and everything after such a node

A node is *suspect* when its result is no stack of rows (no batch dimension) or when the value probe saw rows influence
each other. A suspect whose influence heals before any output stays micro: ``x[arange(B), i]`` is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import fx, nn

from autosplit.trace.effects import Effects
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.record import STATEFUL_LEAVES

Dependencies = Mapping[fx.Node, Collection[fx.Node]]


def value_dependencies(graph: fx.Graph, effects: Effects) -> dict[fx.Node, list[fx.Node]]:
    """Map every node to its operands and to the nodes whose in-place changes it sees."""
    found = {node: list(node.all_input_nodes) for node in graph.nodes}
    for writer, user in effects.flow:
        found[user].append(writer)
    return found


def batched_nodes(graph: fx.Graph, effects: Effects, batched_inputs: Collection[str]) -> set[fx.Node]:
    """Return the nodes whose values depend on a batched input or on the number of rows."""
    depends = value_dependencies(graph, effects)
    batched = {
        node
        for node in graph.nodes
        if node.op == "placeholder" and (INFO not in node.meta or node.meta[INFO].name in batched_inputs)
    }
    size = -1
    while size != len(batched):
        size = len(batched)
        batched.update(n for n in graph.nodes if n.op != "placeholder" and any(d in batched for d in depends[n]))
        for group in effects.storages:
            if any(node in batched for node in group):
                batched.update(group)
    return batched


def structural_suspects(batched: Collection[fx.Node]) -> set[str]:
    """Return the names of batch-dependent nodes whose result is not a stack of rows."""
    return {
        node.meta[INFO].name
        for node in batched
        if node.op != "placeholder"
        and INFO in node.meta
        and any(tensor.batch_dim is None for tensor in node.meta[INFO].tensors)
    }


def classify(
    graph: fx.Graph, root: nn.Module, effects: Effects, batched: set[fx.Node], suspects: Collection[str]
) -> dict[fx.Node, NodeClass]:
    """Return the class of every tensor-computing node."""
    depends = value_dependencies(graph, effects)
    suspect = {n for n in batched if INFO in n.meta and n.meta[INFO].name in suspects}
    output = next(iter(reversed(graph.nodes)))
    seeds = {n for n in output.all_input_nodes if n in suspect}
    seeds |= {n for n in batched if INFO in n.meta and n.meta[INFO].writes and not _keeps_statistics(n, root)}
    full: set[fx.Node] = set()
    grown = _chain(seeds, depends, suspect)
    while grown - full:
        full |= grown
        _descend(graph, effects, depends, batched, full)
        grown = _chain(full, depends, suspect)
    return {
        node: NodeClass.FULL if node in full else NodeClass.MICRO if node in batched else NodeClass.SHARED
        for node in graph.nodes
        if INFO in node.meta
    }


def _chain(seeds: set[fx.Node], depends: Dependencies, suspect: set[fx.Node]) -> set[fx.Node]:
    """Return the seeds and the suspects that lead to them without a gap."""
    found: set[fx.Node] = set()
    todo = list(seeds)
    while todo:
        node = todo.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            todo += [d for d in depends[node] if d in suspect]
    return found


def _descend(
    graph: fx.Graph, effects: Effects, depends: Dependencies, batched: set[fx.Node], full: set[fx.Node]
) -> None:
    """Add to ``full`` what comes after a full node, and once-per-step nodes that come after a batched one."""
    before: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for first, second in effects.order:
        before[second].append(first)
    changed = True
    while changed:
        changed = False
        for node in graph.nodes:
            if node in full or INFO not in node.meta or node.op == "placeholder":
                continue
            earlier = [*depends[node], *before[node]]
            late = node not in batched and any(d in batched and d.op != "placeholder" for d in before[node])
            if late or any(d in full for d in earlier):
                full.add(node)
                changed = True


def _keeps_statistics(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node writes buffers as batch norm does: per microbatch is what it is meant to do."""
    if node.op == "call_module":
        return isinstance(root.get_submodule(str(node.target)), STATEFUL_LEAVES)
    return node.target in (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)


def with_classes(graph: fx.Graph, classes: Mapping[fx.Node, NodeClass]) -> None:
    """Write the classes into the nodes."""
    for node, node_class in classes.items():
        node.meta[INFO] = replace(node.meta[INFO], node_class=node_class)
