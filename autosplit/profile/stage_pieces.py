"""A stage's nodes in pieces: those that run once, and those that run again in the backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx
from torch.utils.checkpoint import checkpoint

from autosplit.profile.stage_graph import StageGraph
from autosplit.trace.graph import INFO


class Runner(Protocol):
    """Who runs the nodes."""

    goes_back: bool
    """The backward is under way."""

    @property
    def outputs(self) -> Collection[fx.Node]:
        """Values that somebody else takes."""

    @property
    def ends(self) -> Mapping[fx.Node, Sequence[fx.Node]]:
        """Values by the last node that takes them."""

    def execute(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        """Run one node and return its result."""

    def end_autocast(self) -> None:
        """Take note that an autocast context ends."""


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

        def forward(*values: Any) -> tuple[Any, ...]:
            inside = dict(zip(taken, values, strict=True))
            try:
                for node in self.nodes:
                    inside[node] = run.execute(node, inside)
                    for dead in run.ends.get(node, ()):
                        inside.pop(dead, None)
            finally:
                if run.goes_back:  # the context in which a unit runs again ends with it, also when it ends early
                    run.end_autocast()
            return tuple(inside[node] for node in given)

        results = checkpoint(forward, *(env[node] for node in taken), use_reentrant=False)
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
    pieces: list[tuple[str, list[fx.Node]]] = []
    for node in nodes:
        info = node.meta.get(INFO)
        unit = unit_path(info.module, units) if info is not None else (pieces[-1][0] if pieces else "")
        if not pieces or pieces[-1][0] != unit:
            pieces.append((unit, []))
        pieces[-1][1].append(node)
    return tuple(Piece(tuple(own), bool(unit)) for unit, own in pieces)


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
