"""Where gradients flow in a recording: from the first that reads something trained to its outputs."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

from torch import fx, nn

from autosplit.trace.borrowed.holders import HOOK_TABLES
from autosplit.trace.borrowed.hooks import code_of, is_of_model
from autosplit.trace.borrowed.state import free_leaves
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.scope import has_module_hooks


class GradientFlow(NamedTuple):
    """The nodes through which gradients flow, and those among them that read something trained; by stable names."""

    nodes: frozenset[str]
    trained: frozenset[str]


def gradient_flow(traced: TracedGraph, inputs: Collection[str]) -> GradientFlow:
    """Return where gradients flow that somebody sees; ``inputs`` are the names of those that want one.

    A hook that has a frozen module's output require gradients (`enable_input_require_grads` of transformers) asks for
    gradients that nobody sees. Where other hooks might, or the model holds trained tensors that are no parameters,
    gradients flow through all nodes.
    """
    root = traced.root
    if _watched(root) or free_leaves(root):
        names = frozenset(info.name for _, info in traced.compute_nodes())
        return GradientFlow(names, names)
    named = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    wanted = {name for name, tensor in named if tensor.requires_grad}
    flowing, weights, trained = set[fx.Node](), set[fx.Node](), set[str]()
    for node in traced.graph.nodes:
        info: TracedNode | None = node.meta.get(INFO)
        reads = not weights.isdisjoint(node.all_input_nodes) or (info is not None and not wanted.isdisjoint(info.reads))
        reads |= node.op == "get_attr" and getattr(attrgetter(node.target)(root), "requires_grad", False) is True
        if not (reads or (info is not None and info.name in inputs) or not flowing.isdisjoint(node.all_input_nodes)):
            continue
        flowing.add(node)
        if reads if info is None else info.node_class is NodeClass.SHARED:
            weights.add(node)
        elif reads and info is not None:
            trained.add(info.name)
    return GradientFlow(frozenset(node.meta[INFO].name for node in flowing if INFO in node.meta), frozenset(trained))


def _watched(root: nn.Module) -> bool:
    """Tell whether hooks have values require gradients, and anything may see these."""
    hooks = [hook for module in root.modules() for table in HOOK_TABLES for hook in vars(module)[table].values()]
    asks = any("requires_grad_" in getattr(code_of(hook)[1], "co_names", ()) for hook in hooks)
    return asks and (has_module_hooks() or not all(map(is_of_model, hooks)))
