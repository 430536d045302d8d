"""Where a stage reads parameters of another unit: its graph says so in its forward, and autograd in the backward.

    forward     enter(0)  embedding   enter(1)  layer 1   enter(2)  layer 2      calls in the stage's graph
    backward    enter(0) ◄── hook ──  enter(1) ◄─ hook ─  enter(2) ◄─ hook ─     before the node of what reads them

A visit is a row of nodes that read parameters of one unit. Autograd runs a graph's nodes in the reverse order of their
making, so a backward makes the visits of its forward in reverse. What is recomputed is visited forward once more
before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torch import fx, nn

from autosplit.errors import TraceError
from autosplit.runtime.lower.region import ROOT, RegionModule
from autosplit.runtime.regions import is_recomputing
from autosplit.tensor.collectives import Move
from autosplit.trace.inputs.objects import tensors_in

_VIEWS = frozenset(
    "alias chunk detach expand expand_as fork flatten getitem mT movedim narrow permute reshape select split squeeze "
    "swapaxes t to transpose type_as unbind unflatten unsqueeze view view_as".split()
)
"""Operations that may return what they take: who reads that reads the parameter."""
_UNITS = "gathered_units"


class Turn(NamedTuple):
    """A unit is gathered for as long as no other one is, and some gradients are complete behind it.

    Attributes:
        unit: its number; None: nothing is gathered.
        complete: names of parameters whose gradients are complete when it is left.
    """

    unit: int | None
    complete: tuple[str, ...] = ()


@dataclass
class Visit:
    """A row of nodes that read parameters of one unit.

    Attributes:
        unit: the number of the unit.
        again: the recomputed region that they lie in; "": none.
        names: the names of the parameters.
    """

    unit: int
    again: str
    names: dict[str, None] = field(default_factory=dict)


class StageVisits(NamedTuple):
    """The visits of a stage, in the order of its forward."""

    visits: tuple[Visit, ...]

    def forward(self) -> list[Turn]:
        """Return the turns of a forward."""
        return joined(Turn(visit.unit) for visit in self.visits)

    def backward(self) -> list[Turn]:
        """Return the turns of a backward: what is recomputed is gone through forward first, and then back."""
        turns: list[Turn] = []
        complete = dict(zip(map(id, self.visits), self.complete(), strict=True))
        for again, members in groupby(reversed(self.visits), lambda visit: visit.again):
            back = list(members)
            if again:  # the hook of its last visit may come before it runs again, or behind
                turns += [Turn(back[0].unit), *(Turn(visit.unit) for visit in reversed(back))]
            turns += [Turn(visit.unit, complete[id(visit)]) for visit in back]
        return joined(turns)

    def complete(self) -> list[tuple[str, ...]]:
        """Return, for each visit, the parameters that no earlier one reads."""
        seen: set[str] = set()
        complete = []
        for visit in self.visits:
            complete.append(tuple(name for name in visit.names if name not in seen))
            seen.update(visit.names)
        return complete


def joined(turns: Iterator[Turn] | Sequence[Turn]) -> list[Turn]:
    """Return turns where those of one unit that follow each other are one."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and merged[-1].unit == turn.unit:
            merged[-1] = Turn(turn.unit, merged[-1].complete + turn.complete)
        else:
            merged.append(turn)
    return merged


def note_visits(region: RegionModule, unit_of: Mapping[str, int], units: Any, *, again: bool) -> StageVisits:
    """Have the graph of a stage call ``units.enter(unit)`` before it reads parameters of another unit.

    ``unit_of`` has the units of parameters by their names; of others nothing is said. ``again``: the whole stage is
    recomputed. Raises TraceError for an operation that reads parameters of several units.
    """
    visits: list[Visit] = []
    _note(region, unit_of, units, visits, "stage" if again else "")
    return StageVisits(tuple(visits))


def _note(region: RegionModule, unit_of: Mapping[str, int], units: Any, visits: list[Visit], again: str) -> None:
    graph, views = region.graph, dict[fx.Node, list[str]]()
    region.__dict__[_UNITS] = units
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target in region.units:
            _note(region.__dict__[str(node.target)].region, unit_of, units, visits, again or str(node.target))
            continue
        names = [name for name in _read(region.root, node, views) if name in unit_of]
        if not names or node.op == "get_attr":
            continue
        if len(read := {unit_of[name] for name in names}) > 1:
            raise TraceError(
                f"{node.name} reads {names[0]!r} and {names[-1]!r}, which lie in different blocks, at once, and "
                "fsdp_reshard='always' gathers one after the other; use fsdp_reshard='never'"
            )
        unit = read.pop()
        if not visits or (visits[-1].unit, visits[-1].again) != (unit, again):
            visits.append(Visit(unit, again))
            with graph.inserting_before(node):
                graph.call_function(enter, (graph.create_node("get_attr", _UNITS), unit))
        visits[-1].names.update(dict.fromkeys(names))
        direct = node.op != "call_module"
        if (node.target is operator.getitem or _name(node) in _VIEWS) if direct else _moves(region, node):
            views[node] = names
        with graph.inserting_after(node):
            holder = graph.create_node("get_attr", _UNITS)
        with graph.inserting_after(holder):
            graph.call_function(leave, (holder, unit, node, direct and node not in views))
    region.recompile()


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _moves(region: RegionModule, node: fx.Node) -> bool:
    """Tell whether a node moves a value among the ranks of tp: one that lies there as it is wanted is returned."""
    return isinstance(region.get_submodule(str(node.target)), Move)


def _read(root: nn.Module, node: fx.Node, views: Mapping[fx.Node, Sequence[str]]) -> Iterator[str]:
    """Yield the names of the parameters that a node may read."""
    if node.op == "call_module":
        yield from _named(root, str(node.target))
    for operand in node.all_input_nodes:
        yield from _named(root, str(operand.target)) if operand.op == "get_attr" else views.get(operand, ())


def _named(root: nn.Module, target: str) -> Iterator[str]:
    """Yield the names of the parameters of a module, or that of a tensor."""
    if target.startswith(f"{ROOT}."):
        path = target.removeprefix(f"{ROOT}.")
        yield path
        parent, _, name = path.rpartition(".")
        if (module := root.get_submodule(parent)._modules.get(name)) is not None:
            yield from (f"{path}.{inner}" for inner, _ in module.named_parameters(remove_duplicate=False))


def enter(units: Any, unit: int) -> None:
    """Say that parameters of a unit are read from now on."""
    units.enter(unit)


def leave(units: Any, unit: int, value: Any, fresh: bool) -> None:
    """Have the backward of what read parameters of a unit say so, too; ``fresh``: its memory is not the unit's."""
    for tensor in () if is_recomputing() else tensors_in(value):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: units.enter(unit))
        if fresh:
            units.check_fresh(unit, tensor)
