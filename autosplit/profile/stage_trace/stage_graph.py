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

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """The placeholders, in order."""
        return (*self.numbers, *self.inputs)

    @property
    def own(self) -> tuple[fx.Node, ...]:
        """All other nodes, in model order."""
        return tuple(node for node in self.graph.nodes if node.op != "placeholder")

    def computing(self) -> list[tuple[fx.Node, TracedNode]]:
        """Return the nodes that compute, in model order."""
        return _computing(self.own)


@dataclass(frozen=True)
class StageNodes:
    """The nodes of one stage in the recording itself: what tells of a stage all but how it runs, without a copy.

    Attributes:
        graphs: of the recording, which copy it.
        root: the recording's.
        numbers: placeholders for the rows and the lengths, in the recording's order.
        inputs: values that other stages or the caller give.
        own: the stage's nodes, and before them the numbers and parameters that they need, in model order.
        outputs: values that other stages or the caller take.
    """

    graphs: StageGraphs
    root: nn.Module
    numbers: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    own: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """What a graph of the stage has placeholders for, in order."""
        return (*self.numbers, *self.inputs)

    def computing(self) -> list[tuple[fx.Node, TracedNode]]:
        """Return the nodes that compute, in model order."""
        return _computing(self.own)

    def copied(self) -> StageGraph:
        """Return the stage as a graph of its own."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.numbers:
            copies[node] = graph.node_copy(node)
        for node in self.inputs:
            copies[node] = graph.placeholder(f"given_{node.name}")
            copies[node].meta = dict(node.meta)
        for node in self.own:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return StageGraph(
            graph,
            self.root,
            tuple(copies[node] for node in self.numbers),
            tuple(copies[node] for node in self.inputs),
            tuple(copies[node] for node in self.outputs),
            tuple(self.graphs.unused(self.own)),
        )


def stage_graph(traced: TracedGraph, names: Collection[str] | None = None) -> StageGraph:
    """Return the graph of the nodes called ``names`` (None: of all nodes of the recording)."""
    return StageGraphs(traced).nodes(names).copied()


class StageGraphs:
    """The stages of a recording, from what is read of it once: the recording stays as it is meanwhile."""

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self.first_output = _first_output(traced)
        self._operands = {node: tuple(node.all_input_nodes) for node in traced.graph.nodes}
        self._places = {node: place for place, node in enumerate(self._operands)}
        self._by_name = {info.name: node for node, info in traced.compute_nodes()}
        self._numbers = tuple(n for n in self._operands if n.op == "placeholder" and INFO not in n.meta)
        self._modules = dict(traced.root.named_modules(remove_duplicate=False))
        self._inside: dict[str, tuple[int, ...]] = {}

    def nodes(self, names: Collection[str] | None = None) -> StageNodes:
        """Return the nodes called ``names`` as a stage (None: all nodes of the recording)."""
        wanted = self._by_name if names is None else names
        computing = sorted((self._by_name[n] for n in wanted if n in self._by_name), key=self._places.__getitem__)
        stage = frozenset(computing)
        inputs = tuple(node for node in self._taken(computing) if node not in stage)
        placed: dict[fx.Node, None] = dict.fromkeys((*self._numbers, *inputs))
        for node in computing:
            self._place(node, placed)
        own = tuple(placed)[len(self._numbers) + len(inputs) :]
        outputs = tuple(node for node in own if node in stage and _leaves(node, stage))
        return StageNodes(self, self.traced.root, self._numbers, inputs, own, outputs)

    def _taken(self, computing: Collection[fx.Node]) -> dict[fx.Node, None]:
        """Return the values, of anyone, that the stage's nodes take, directly or as parts of a result."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set(self._numbers)
        todo = [operand for node in computing for operand in self._operands[node]]
        for node in todo:
            if node in seen:
                continue
            seen.add(node)
            if INFO in node.meta:
                found[node] = None
            else:
                todo.extend(self._operands[node])
        return found

    def _place(self, node: fx.Node, placed: dict[fx.Node, None]) -> None:
        """Place a node of the stage, or a number, parameter or part of a result, behind what it needs."""
        for operand in self._operands[node]:
            if operand not in placed:
                self._place(operand, placed)
        placed[node] = None

    def unused(self, nodes: Collection[fx.Node]) -> Iterator[str]:
        """Yield the paths of the outermost modules of which none of the nodes uses anything."""
        around: set[int] = {id(self.traced.root)}
        inside: set[int] = set()
        for path in dict.fromkeys(str(node.target) for node in nodes if node.op in ("call_module", "get_attr")):
            if path in self._modules:
                if path not in self._inside:
                    self._inside[path] = tuple(id(module) for module in self._modules[path].modules())
                inside.update(self._inside[path])
            while path:
                path = path.rpartition(".")[0]
                around.add(id(self._modules.get(path)))
        for path, module in self._modules.items():
            above = self._modules[path.rpartition(".")[0]]
            if id(module) not in inside and id(module) not in around and id(above) in around:
                yield path


def _computing(nodes: Collection[fx.Node]) -> list[tuple[fx.Node, TracedNode]]:
    return [(node, node.meta[INFO]) for node in nodes if INFO in node.meta]


def _leaves(node: fx.Node, stage: Collection[fx.Node]) -> bool:
    """Tell whether somebody outside the stage takes a node's value, or a part of it."""
    for user in node.users:
        if user.op == "output" or (INFO in user.meta and user not in stage):
            return True
        if INFO not in user.meta and _leaves(user, stage):
            return True
    return False


def _first_output(traced: TracedGraph) -> fx.Node | None:
    """Return the first of the model's outputs that is differentiable."""
    results = [v for n in traced.graph.nodes if n.op == "output" for v in n.all_input_nodes if INFO in v.meta]
    return next((value for value in results if value.meta[INFO].tensors[0].differentiable), None)
