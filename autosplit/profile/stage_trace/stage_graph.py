"""One stage's nodes: what comes in, what goes out, and what runs once or again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx, nn

from autosplit.trace.graph import INFO, TracedGraph, TracedNode


@dataclass(frozen=True)
class StageNodes:
    """The nodes of one stage: those of the recording, or of a copy without most of its repeated blocks.

    Attributes:
        root: the recording's, where modules, parameters and constants are.
        numbers: placeholders for the rows and the lengths, in the recording's order.
        inputs: values that other stages or the caller give.
        nodes: the stage's nodes, and before them the numbers and parameters that they need, in model order.
        outputs: values that other stages or the caller take.
        tied: qualified names of the parameters that several of the recording's nodes use as values.
    """

    root: nn.Module
    numbers: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    tied: frozenset[str] = frozenset()

    def computing(self) -> list[tuple[fx.Node, TracedNode]]:
        """Return the nodes that compute, in model order."""
        return [(node, node.meta[INFO]) for node in self.nodes if INFO in node.meta]


class Stages:
    """The stages of a recording, from what is read of it once: the recording stays as it is meanwhile."""

    def __init__(self, traced: TracedGraph) -> None:
        self.root = traced.root
        self.first_output = first_output(traced)
        self._operands = {node: tuple(node.all_input_nodes) for node in traced.graph.nodes}
        self._tied = frozenset(traced.tied)
        self._places = {node: position for position, node in enumerate(self._operands)}
        self._by_name = {info.name: node for node, info in traced.compute_nodes()}
        self._numbers = tuple(n for n in self._operands if n.op == "placeholder" and INFO not in n.meta)

    def of(self, names: Collection[str] | None = None) -> StageNodes:
        """Return the nodes called ``names`` as a stage (None: all nodes of the recording)."""
        wanted = self._by_name if names is None else names
        computing = sorted((self._by_name[n] for n in wanted if n in self._by_name), key=self._places.__getitem__)
        stage = frozenset(computing)
        inputs = tuple(node for node in self._taken(computing) if node not in stage)
        placed: dict[fx.Node, None] = dict.fromkeys((*self._numbers, *inputs))
        for node in computing:
            self._place(node, placed)
        nodes = tuple(placed)[len(self._numbers) + len(inputs) :]
        outputs = tuple(node for node in nodes if node in stage and not stage.issuperset(users_of(node)))
        return StageNodes(self.root, self._numbers, inputs, nodes, outputs, self._tied)

    def _taken(self, computing: Collection[fx.Node]) -> dict[fx.Node, None]:
        """Return the values, of anyone, that the stage's nodes take, directly or as parts of a result."""
        taken: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set(self._numbers)
        todo = [operand for node in computing for operand in self._operands[node]]
        for node in todo:
            if node in seen:
                continue
            seen.add(node)
            if INFO in node.meta:
                taken[node] = None
            else:
                todo.extend(self._operands[node])
        return taken

    def _place(self, node: fx.Node, placed: dict[fx.Node, None]) -> None:
        """Place a node of the stage, or a number, parameter or part of a result, behind what it needs."""
        for operand in self._operands[node]:
            if operand not in placed:
                self._place(operand, placed)
        placed[node] = None


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield who takes a node's value, or a part of it: nodes that compute, and the output."""
    for user in node.users:
        if user.op == "output" or INFO in user.meta:
            yield user
        else:
            yield from users_of(user)


def first_output(traced: TracedGraph) -> fx.Node | None:
    """Return the first of the model's outputs that is differentiable."""
    results = [v for n in traced.graph.nodes if n.op == "output" for v in n.all_input_nodes if INFO in v.meta]
    return next((value for value in results if value.meta[INFO].tensors[0].differentiable), None)


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def in_units(nodes: Sequence[fx.Node], units: Collection[str]) -> list[tuple[str, tuple[fx.Node, ...]]]:
    """Return nodes of a stage, in model order, cut where a unit begins or ends, each piece with its unit's path or "".

    Pieces are joined where a storage or a buffer that one makes or reads is changed in another. What touches an input
    that the model changes is in no unit.
    """
    pieces: list[tuple[str, list[fx.Node]]] = []
    for node in nodes:
        info = node.meta.get(INFO)
        unit = unit_path(info.module, units) if info is not None else (pieces[-1][0] if pieces else "")
        if not pieces or pieces[-1][0] != unit:
            pieces.append((unit, []))
        pieces[-1][1].append(node)
    joined: list[tuple[str, list[fx.Node]]] = []
    for (unit, piece), together in zip(pieces, _joins(pieces), strict=True):
        if together:
            joined[-1] = joined[-1][0] or unit, joined[-1][1] + piece
        else:
            joined.append((unit, piece))
    return [("" if any(map(_takes_changed, piece)) else unit, tuple(piece)) for unit, piece in joined]


def _joins(pieces: Sequence[tuple[str, Sequence[fx.Node]]]) -> list[bool]:
    """Tell of every piece whether it must not be parted from the one before it."""
    spans: dict[int, tuple[int, int]] = {}
    changed: set[int] = set()
    for number, (_, piece) in enumerate(pieces):
        for info in (node.meta[INFO] for node in piece if INFO in node.meta):
            if info.colocation_group is not None:
                spans[info.colocation_group] = spans.get(info.colocation_group, (number, number))[0], number
                changed |= {info.colocation_group} if info.mutated or info.writes else set()
    own_spans = [spans[group] for group in changed]
    return [any(first < number <= last for first, last in own_spans) for number in range(len(pieces))]


def _takes_changed(node: fx.Node) -> bool:
    inputs = (n.meta[INFO] for n in node.all_input_nodes if n.op == "placeholder" and INFO in n.meta)
    return any(info.mutated for info in inputs)


def block_paths(root: nn.Module, modules: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the blocks that some modules are or lie in: children of Sequential and its kind, outermost.

    A child that holds blocks itself is looked into; one of torch's own layers is no block.
    """
    paths: dict[str, None] = {}
    for module in dict.fromkeys(modules):
        parent, path = root, ""
        for name in module.split(".") if module else ():
            child = parent._modules.get(name)
            if child is None:
                break
            path = f"{path}.{name}" if path else name
            if _is_container(parent, top=parent is root) and _is_block(child):
                paths[path] = None
                break
            parent = child
    return tuple(paths)


def _is_container(module: nn.Module, *, top: bool) -> bool:
    """Tell whether a module is a row of others; of a recording's root, which is bare, its children's names tell."""
    numbered = all(name.isdecimal() for name in module._modules)
    return isinstance(module, _CONTAINERS) or (top and bool(module._modules) and numbered)


def _is_block(module: nn.Module) -> bool:
    children = [child for child in module._modules.values() if child is not None]
    if isinstance(module, _CONTAINERS):
        return bool(children) and not any(child._modules for child in children)
    return bool(children) or not type(module).__module__.startswith("torch.nn")


def unit_path(module: str, units: Collection[str]) -> str:
    """Return which of the units a module is or lies in; "" for none."""
    while module and module not in units:
        module = module.rpartition(".")[0]
    return module
