"""Which nodes run once before the microbatches, once per microbatch, or once on merged values.

    shared   depends neither on a batched input nor on the number of rows
    micro    depends on the batch, rows independent
    full     mixes rows in a way that reaches an output or a buffer, and everything after such a node

A node is *mixing* when rows influence each other in it: the value probe saw it, its result depends on the batch and is
no stack of rows, or it permutes rows at random. Whatever is computed from it is mixing too: a gate that is zero or a
mask that is empty in the sample hides influence. A node is *suspect* also where its rows lie in another order, or are
numbered. The probe follows rows, so it knows where they are a stack again: behind ``x[arange(B), i]``, two flips, or a
batch that was merged into another dimension and came out again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import fx, nn

from autosplit.trace.graph import INFO, LENGTH, NodeClass, TracedNode
from autosplit.trace.recording.build import Effects
from autosplit.trace.rows.findings import Findings, key_of_opaque
from autosplit.trace.rows.grouped import Grouped, grouped
from autosplit.trace.rows.kinds import (
    keeps_statistics,
    mixes_gradients,
    normalises_rows_apart,
    permutes_at_random,
    takes_shape_only,
)
from autosplit.trace.rows.operator_probe import without_values
from autosplit.trace.rows.tallies import tallies

Dependencies = Mapping[fx.Node, Collection[fx.Node]]


def value_dependencies(graph: fx.Graph, effects: Effects) -> dict[fx.Node, list[fx.Node]]:
    """Map every node to its operands and to the nodes whose in-place changes it sees."""
    depends = {node: list(node.all_input_nodes) for node in graph.nodes}
    for writer, user in effects.flow:
        depends[user].append(writer)
    return depends


def batched_nodes(graph: fx.Graph, effects: Effects, batched_inputs: Collection[str]) -> set[fx.Node]:
    """Return the nodes whose values depend on a batched input or on the number of rows."""
    depends = value_dependencies(graph, effects)
    batched = {
        node
        for node in graph.nodes
        if node.op == "placeholder"
        and LENGTH not in node.meta
        and (INFO not in node.meta or node.meta[INFO].name in batched_inputs)
    }
    size = -1
    while size != len(batched):
        size = len(batched)
        batched.update(n for n in graph.nodes if n.op != "placeholder" and any(d in batched for d in depends[n]))
        for group in effects.storages:
            if any(node in batched for node in group):
                batched.update(group)
    return batched


def mixing_nodes(graph: fx.Graph, root: nn.Module, batched: Collection[fx.Node], findings: Findings) -> set[fx.Node]:
    """Return the batch-dependent nodes that mix rows by their structure, whatever the values are."""
    with torch.device("cpu"):  # made-up values lie there, also in a context that makes meta tensors
        made_up = None if findings.probed else without_values(graph, root)
        return {
            node
            for node in graph.nodes
            if node in batched
            and node.op != "placeholder"
            and INFO in node.meta
            and not takes_shape_only(node, root)
            and (
                any(tensor.batch_dim is None for tensor in node.meta[INFO].tensors)
                or (node.meta[INFO].whole and not _is_alone(node.meta[INFO], root, findings.alone))
                or permutes_at_random(node, root)
                or (made_up is not None and made_up.mixes_made_up(node))
                or mixes_gradients(node, root)
            )
        }


def _is_alone(info: TracedNode, root: nn.Module, alone: Collection[str]) -> bool:
    return bool(info.module) and key_of_opaque(info.name, root.get_submodule(info.module)) in alone


def classify(
    graph: fx.Graph,
    root: nn.Module,
    effects: Effects,
    batched: set[fx.Node],
    findings: Findings,
    *,
    whole_norms: bool = False,
) -> dict[fx.Node, NodeClass]:
    """Return the class of every tensor-computing node; with ``whole_norms`` batch norms that count are full."""
    depends = value_dependencies(graph, effects)
    sorts = grouped(graph, root)
    suspect = _spread(graph, root, depends, batched, findings, sorts)
    output = next(iter(reversed(graph.nodes)))
    rowless = _rowless(batched)
    seen = {n for n in output.all_input_nodes if n in suspect or n in rowless}
    shared = (set(group) for group in effects.storages if not set(group).isdisjoint(output.all_input_nodes))
    seeds = seen.union(*(group & suspect for group in shared))  # no node reads what changes an output last
    seeds |= {n for n in batched if INFO in n.meta and n.meta[INFO].whole and not n.meta[INFO].tensors}
    seeds |= {n for n in batched if permutes_at_random(n, root)}  # whole, also where no output depends on it
    writers = {n for n in batched if INFO in n.meta and n.meta[INFO].writes}
    adding = tallies(graph, root)
    counting = {n for n in writers if keeps_statistics(n, root)} | adding
    seeds |= writers - counting
    seeds |= {n for n in counting - adding if whole_norms and not normalises_rows_apart(n, root)}
    seeds |= {n for writer, n in effects.flow if writer in counting and n in batched and n not in counting}
    full = _chain(seeds, depends, suspect)
    size = -1
    while size != len(full):
        size = len(full)
        _descend(graph, effects, depends, batched, full)
        full |= _chain(full, depends, suspect)
        full.update(node for node, sort in sorts.order.items() if sort in full)
        full |= {operand for node in full for operand in node.all_input_nodes if operand in rowless}
        full |= _parted(effects, batched, full)
    return {
        node: NodeClass.FULL if node in full else NodeClass.MICRO if node in batched else NodeClass.SHARED
        for node in graph.nodes
        if INFO in node.meta
    }


def _spread(
    graph: fx.Graph,
    root: nn.Module,
    depends: Dependencies,
    batched: set[fx.Node],
    findings: Findings,
    sorts: Grouped,
) -> set[fx.Node]:
    """Return all suspects: those that the probe saw, those that mix, and what is computed from these."""
    mixing = {node for node in mixing_nodes(graph, root, batched, findings) if node not in sorts.sorting}
    mixing |= {node for node in batched if INFO in node.meta and node.meta[INFO].name in findings.mixing}
    suspect = {n for n in batched if INFO in n.meta and n.meta[INFO].name in findings.suspects}
    for node in graph.nodes:
        if node not in batched or node.op == "placeholder" or takes_shape_only(node, root):
            continue
        bounds = sorts.bounds.get(node)  # where groups end depends on all rows, what a product gives a row does not
        operands = [d for d in depends[node] if d is not bounds]
        if any(d in mixing for d in operands):
            mixing.add(node)
        elif INFO not in node.meta and any(d in suspect for d in operands):  # a part of a structure, or a number
            suspect.add(node)
    return suspect | mixing


def _chain(seeds: set[fx.Node], depends: Dependencies, suspect: set[fx.Node]) -> set[fx.Node]:
    """Return the seeds and the suspects that lead to them without a gap."""
    chain: set[fx.Node] = set()
    todo = list(seeds)
    while todo:
        node = todo.pop()
        if node not in chain and node.op != "placeholder":
            chain.add(node)
            todo += [d for d in depends[node] if d in suspect]
    return chain


def _descend(
    graph: fx.Graph, effects: Effects, depends: Dependencies, batched: set[fx.Node], full: set[fx.Node]
) -> None:
    """Add to ``full`` what comes after a full node, and once-per-step nodes that come after a batched one."""
    before: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for first, second in effects.order:
        before[second].append(first)
    for node in graph.nodes:  # what a node depends on, and what it must follow, stands before it
        if INFO not in node.meta or node.op == "placeholder":
            continue
        late = node not in batched and any(d in batched and d.op != "placeholder" for d in before[node])
        if late or any(d in full for d in (*depends[node], *before[node])):
            full.add(node)


def _rowless(batched: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose values are no stacks of rows and cannot be merged, such as ``x.new_zeros(3)``."""
    computed = (node for node in batched if node.op != "placeholder" and INFO in node.meta)
    return {node for node in computed if any(tensor.batch_dim is None for tensor in node.meta[INFO].tensors)}


def _parted(effects: Effects, batched: set[fx.Node], full: set[fx.Node]) -> set[fx.Node]:
    """Return what shares a storage with a full node of those that change it: merged views share no storage."""
    groups = [{node for node in group if node in batched} for group in effects.storages]
    return {node for group in groups if group & full and len(group - full) > 1 for node in group}


def with_classes(classes: Mapping[fx.Node, NodeClass]) -> None:
    """Write the classes into the nodes."""
    for node, node_class in classes.items():
        node.meta[INFO] = replace(node.meta[INFO], node_class=node_class)
