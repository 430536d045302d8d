"""One stage's nodes as a graph of their own, with placeholders for what comes in and an output of what goes out."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx, nn

from autosplit.trace.graph import INFO, TracedGraph, TracedNode


@dataclass(frozen=True)
class StageGraph:
    """The nodes of one stage, copied; every copy keeps what the recording knows in its ``meta``.

    Attributes:
        graph: placeholders, the stage's nodes and the numbers that they need in model order, and no output node.
        root: the recording's, where modules, parameters and constants are.
        numbers: placeholders for the rows and the lengths, in the recording's order.
        inputs: placeholders for values that other stages or the caller give.
        outputs: values that other stages or the caller take.
        without: paths of modules of the root that no node of the graph uses, the outermost of each tree.
    """

    graph: fx.Graph
    root: nn.Module
    numbers: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    without: tuple[str, ...] = ()

    def computing(self) -> list[tuple[fx.Node, TracedNode]]:
        """Return the nodes that compute, in model order."""
        return [(n, n.meta[INFO]) for n in self.graph.nodes if n.op != "placeholder" and INFO in n.meta]


def stage_graph(traced: TracedGraph, names: Collection[str] | None = None) -> StageGraph:
    """Return the graph of the nodes called ``names`` (None: of all nodes of the recording)."""
    return _Copy(traced, names).made()


class _Copy:
    def __init__(self, traced: TracedGraph, names: Collection[str] | None) -> None:
        self.traced = traced
        wanted = None if names is None else frozenset(names)
        self.own = {n for n, info in traced.compute_nodes() if wanted is None or info.name in wanted}
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self.numbers: list[fx.Node] = []

    def made(self) -> StageGraph:
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and INFO not in node.meta:
                self.copies[node] = self.graph.node_copy(node)
                self.numbers.append(self.copies[node])
        taken = [node for node in self._taken() if node not in self.own]
        for node in taken:
            self.copies[node] = self.graph.placeholder(f"given_{node.name}")
            self.copies[node].meta = dict(node.meta)
            self.inputs.append(self.copies[node])
        for node in self.traced.graph.nodes:
            if node in self.own:
                self._copy(node)
        outputs = [self.copies[node] for node in self.own if self._leaves(node)]
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        return StageGraph(
            self.graph,
            self.traced.root,
            tuple(self.numbers),
            tuple(self.inputs),
            tuple(sorted(outputs, key=order.__getitem__)),
            tuple(_unused(self.traced.root, self.graph)),
        )

    def _taken(self) -> dict[fx.Node, None]:
        """Return the values, of anyone, that the stage's nodes take, directly or as parts of a result."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        todo = [operand for node in self.traced.graph.nodes if node in self.own for operand in node.all_input_nodes]
        for node in todo:
            if node in seen or node in self.copies:
                continue
            seen.add(node)
            if INFO in node.meta:
                found[node] = None
            else:
                todo.extend(node.all_input_nodes)
        return found

    def _copy(self, node: fx.Node) -> fx.Node:
        """Copy a node of the stage, or a number, parameter or part of a result that one needs."""
        for operand in node.all_input_nodes:
            if operand not in self.copies:
                self._copy(operand)
        self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        self.copies[node].meta = dict(node.meta)
        return self.copies[node]

    def _leaves(self, node: fx.Node) -> bool:
        """Tell whether somebody outside the stage takes a node's value, or a part of it."""
        for user in node.users:
            if user.op == "output" or (INFO in user.meta and user not in self.own):
                return True
            if INFO not in user.meta and self._leaves(user):
                return True
        return False


def _unused(root: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """Yield the paths of the outermost modules of which a graph uses nothing."""
    modules = dict(root.named_modules(remove_duplicate=False))
    around: set[int] = {id(root)}
    inside: set[int] = set()
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        path = str(node.target)
        if path in modules:
            inside.update(id(module) for module in modules[path].modules())
        while path:
            path = path.rpartition(".")[0]
            around.add(id(modules.get(path)))
    used = around | inside
    for path, module in modules.items():
        above = modules[path.rpartition(".")[0]]
        if id(module) not in used and id(above) in around:
            yield path
