"""A stage's nodes in pieces: those that run once, and those that run again in the backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from autosplit.profile.stage_trace.stage_graph import StageGraph
from autosplit.trace.graph import INFO

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Runner(Protocol):
    """Who runs the nodes."""

    @property
    def outputs(self) -> Collection[fx.Node]:
        """Values that somebody else takes."""

    @property
    def ends(self) -> Mapping[fx.Node, Sequence[fx.Node]]:
        """Values by the last node that takes them."""

    def execute(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        """Run one node and return its result."""

    def unit(self) -> AbstractContextManager[None]:
        """Return the context in which a unit's nodes run, for the first time or again in the backward."""

    def copied(self, nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
        """Return copies of the buffers that nodes take and the forward writes: they are kept for the second run."""


@dataclass(frozen=True)
class Piece:
    """Nodes that run one after the other, as they are or to be run again in the backward."""

    nodes: tuple[fx.Node, ...]
    again: bool

    def run(self, run: Runner, env: dict[fx.Node, Any]) -> None:
        """Run the nodes on the values in ``env``, which holds afterwards what is still to be taken."""
        if not self.again:
            for node in self.nodes:
                env[node] = run.execute(node, env)
                for dead in run.ends.get(node, ()):
                    env.pop(dead, None)
            return
        own = set(self.nodes)
        taken = list(dict.fromkeys(o for n in self.nodes for o in n.all_input_nodes if o not in own))
        given = [n for n in self.nodes if n in run.outputs or any(user not in own for user in n.users)]

        def forward(_copies: Any, *values: Any) -> tuple[Any, ...]:
            inside = dict(zip(taken, values, strict=True))
            with run.unit():
                for node in self.nodes:
                    inside[node] = run.execute(node, inside)
                    for dead in run.ends.get(node, ()):
                        inside.pop(dead, None)
            return tuple(inside[node] for node in given)

        results = checkpoint(forward, run.copied(self.nodes), *(env[node] for node in taken), use_reentrant=False)
        env |= zip(given, results, strict=True)
        del results
        for node in self.nodes:
            for dead in run.ends.get(node, ()):
                env.pop(dead, None)


def cut_in_pieces(stage: StageGraph, units: Collection[str], *, whole: bool) -> tuple[Piece, ...]:
    """Return the stage's nodes cut where a unit begins or ends."""
    nodes = [node for node in stage.graph.nodes if node.op != "placeholder"]
    if whole or not units:
        return (Piece(tuple(nodes), whole),) if nodes else ()
    return tuple(Piece(own, bool(unit)) for unit, own in in_units(nodes, units))


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
    for (unit, own), together in zip(pieces, _joins(pieces), strict=True):
        if together:
            joined[-1] = joined[-1][0] or unit, joined[-1][1] + own
        else:
            joined.append((unit, own))
    return [("" if any(map(_takes_changed, own)) else unit, tuple(own)) for unit, own in joined]


def _joins(pieces: Sequence[tuple[str, Sequence[fx.Node]]]) -> list[bool]:
    """Tell of every piece whether it must not be parted from the one before it."""
    spans: dict[int, tuple[int, int]] = {}
    changed: set[int] = set()
    for number, (_, own) in enumerate(pieces):
        for info in (node.meta[INFO] for node in own if INFO in node.meta):
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
    found: dict[str, None] = {}
    for module in dict.fromkeys(modules):
        parent, path = root, ""
        for name in module.split(".") if module else ():
            child = parent._modules.get(name)
            if child is None:
                break
            path = f"{path}.{name}" if path else name
            if _is_container(parent, top=parent is root) and _is_block(child):
                found[path] = None
                break
            parent = child
    return tuple(found)


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


def last_uses(pieces: Sequence[Piece], *, keep: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map nodes to the values that nobody takes after them."""
    last: dict[fx.Node, fx.Node] = {}
    for piece in pieces:
        for node in piece.nodes:
            last[node] = node
            for operand in node.all_input_nodes:
                last[operand] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value not in keep:
            found.setdefault(node, []).append(value)
    return found
