"""Recordings made by hand: fx's own tracer, shapes from two runs at different batch sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace.graph import INFO, InputInfo, NodeClass, Size, TensorInfo, TracedGraph, TracedNode


class Leaf(nn.Module):
    """A module that is one node."""


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Leaf) or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Remember the shapes and dtypes of every node's tensors."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.seen: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        leaves = torch.utils._pytree.tree_leaves(result)
        self.seen[n.name] = [(tuple(t.shape), t.dtype) for t in leaves if isinstance(t, torch.Tensor)]
        return result


def traced(
    model: nn.Module,
    *inputs: torch.Tensor,
    classes: Mapping[str, NodeClass] | None = None,
    mutated: Collection[str] = (),
) -> TracedGraph:
    """Return a recording of ``model``; ``classes`` and ``mutated`` name fx nodes. The inputs' dim 0 is the batch."""
    graph = _Tracer().trace(model)
    small, large = (_shapes(model, graph, rows, inputs) for rows in (2, 5))
    names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    infos = []
    for node in graph.nodes:
        tensors = tuple(
            TensorInfo(tuple(_size(a, b) for a, b in zip(first, second, strict=True)), dtype)
            for (first, dtype), (second, _) in zip(small[node.name], large[node.name], strict=True)
        )
        if node.op in ("get_attr", "output"):
            continue
        info = TracedNode(node.name, "", (classes or {}).get(node.name, NodeClass.MICRO), tensors)
        if node.op == "placeholder":
            info = replace(info, name=f"input/{node.name}")
            infos.append(InputInfo(node.name, len(infos), 0))
        elif node.op == "call_module":
            info = replace(info, reads=tuple(name for name in names if name.startswith(f"{node.target}.")))
        else:
            attributes = tuple(str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr")
            info = replace(info, reads=attributes)
        node.meta[INFO] = replace(info, mutated=node.name in mutated)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("rows")
    return TracedGraph(graph, model, tuple(infos), (), (), 1, lambda flat: flat[0])


def _shapes(
    model: nn.Module, graph: fx.Graph, rows: int, inputs: tuple[torch.Tensor, ...]
) -> dict[str, list[tuple[tuple[int, ...], torch.dtype]]]:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    shapes = _Shapes(model, graph)
    with torch.random.fork_rng(), torch.no_grad():
        shapes.run(*(x[:1].expand(rows, *x.shape[1:]).clone() for x in inputs))
        for buffer, content in buffers:
            buffer.copy_(content)
    return shapes.seen


def _size(at_two: int, at_five: int) -> Size:
    per_row = (at_five - at_two) // 3
    return Size(per_row, at_two - 2 * per_row)
