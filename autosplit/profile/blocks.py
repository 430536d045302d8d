"""Repeated blocks are profiled once, in context: a graph without most of them stands for the whole.

    whole     pre   block 0   block 1   block 2   block 3  …  block n-1   post
    short     pre   block 0   block 1                         block n-1   post
                              template of blocks 1 … n-2

Block ``i`` takes values of block ``i-1`` and what all take alike, and nobody but block ``i+1`` takes its own. So what
the template allocates, saves and frees the others do too, on storages in the same places of their own, of the block
before and of the block behind. Expanding renames storages; it multiplies nothing approximately.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn

from autosplit.memory.events import Change, Held, StageTrace, Step
from autosplit.profile.fake import NodeCosts
from autosplit.profile.stage_graph import StageGraph
from autosplit.trace.graph import INFO, TracedNode

_FEWEST = 4
"""A run of fewer blocks is profiled as it is."""
_DEEPEST = 4
"""How many numbered components of a module's path may name its block."""


class Uneven(Exception):
    """What the blocks did does not fit together: the whole graph must be run."""


@dataclass(frozen=True)
class Run:
    """Equal blocks one after the other: their paths, and the nodes of each, in order."""

    paths: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]

    @property
    def copies(self) -> int:
        """How many blocks the template stands for."""
        return len(self.paths) - 2


@dataclass(frozen=True)
class Short:
    """A stage's graph without most of its repeated blocks, and how to give them back."""

    stage: StageGraph
    runs: tuple[Run, ...]

    def trace(self, short: StageTrace) -> StageTrace:
        """Return the trace of the whole stage from that of the short one; raises Uneven."""
        return _Traces(self.runs, short).expanded()

    def costs(self, short: Mapping[str, NodeCosts]) -> dict[str, NodeCosts]:
        """Return the costs of all nodes from those of the short stage; raises Uneven."""
        return _Costs(self.runs, short).expanded()


def shorten(stage: StageGraph) -> Short:
    """Return a stage without the blocks that others stand for; the same one where there are none."""
    runs = tuple(find_runs(stage))
    if not runs:
        return Short(stage, ())
    skipped: dict[fx.Node, fx.Node] = {}
    for run in runs:
        for block in run.nodes[2:-1]:
            skipped |= zip(block, run.nodes[1], strict=True)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in stage.graph.nodes:
        if node not in skipped:
            copies[node] = graph.node_copy(node, lambda operand: copies[skipped.get(operand, operand)])
            copies[node].meta = node.meta

    def copied(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(copies[node] for node in nodes)

    numbers, inputs, outputs = copied(stage.numbers), copied(stage.inputs), copied(stage.outputs)
    return Short(replace(stage, graph=graph, numbers=numbers, inputs=inputs, outputs=outputs), runs)


# -- finding -----------------------------------------------------------------------------------------------------------
def find_runs(stage: StageGraph) -> Iterator[Run]:
    """Yield the runs of at least four equal blocks: modules whose paths end in a number, such as ``layers.7``."""
    taken: set[fx.Node] = set()
    for depth in range(1, _DEEPEST + 1):
        for run in _Blocks(stage, depth, taken).runs():
            taken.update(node for block in run.nodes for node in block)
            yield run


class _Blocks:
    def __init__(self, stage: StageGraph, depth: int, taken: set[fx.Node]) -> None:
        self.stage, self.outputs = stage, frozenset(stage.outputs)
        nodes = [n for n in stage.graph.nodes if n.op != "placeholder"]
        paths = _paths(nodes, depth)
        groups = [(path, tuple(own)) for path, own in groupby(nodes, key=paths.__getitem__)]
        counts: dict[str, int] = {}
        for path, _ in groups:
            counts[path] = counts.get(path, 0) + 1
        self.groups = [(p if counts[p] == 1 and taken.isdisjoint(own) else "", own) for p, own in groups]
        self.kinds: dict[str, Hashable] = {}

    def runs(self) -> Iterator[Run]:
        """Yield maximal runs: every block like the one before it, but for the first, whose inputs may be others."""
        blocks: list[tuple[str, tuple[fx.Node, ...]]] = []
        like: Hashable = None
        for path, own in [*self.groups, ("", ())]:
            kind = self._kind(path, own, blocks[-1][1] if blocks else ()) if path else None
            if path and len(blocks) == 1 and not self._leaks(blocks[0][1], own) and len(own) == len(blocks[0][1]):
                like = kind
            if not (path and blocks and kind == like and not self._leaks(blocks[-1][1], own)):
                yield from self._run(blocks)
                blocks, like = [], None
            if path:
                blocks.append((path, own))

    @staticmethod
    def _run(blocks: Sequence[tuple[str, tuple[fx.Node, ...]]]) -> Iterator[Run]:
        if len(blocks) >= _FEWEST:
            yield Run(tuple(path for path, _ in blocks), tuple(own for _, own in blocks))

    def _leaks(self, own: Sequence[fx.Node], following: Sequence[fx.Node]) -> bool:
        """Tell whether anybody but the block itself and the next one takes its values."""
        near = {*own, *following}
        return any(node in self.outputs or not near.issuperset(node.users) for node in own)

    def _kind(self, path: str, own: Sequence[fx.Node], before: Sequence[fx.Node]) -> Hashable:
        """Return all that what a block does may depend on."""
        places: dict[fx.Node, Hashable] = {node: ("before", number) for number, node in enumerate(before)}
        places |= {node: ("own", number) for number, node in enumerate(own)}

        def described(value: Any) -> Hashable:
            if isinstance(value, fx.Node):
                return places.get(value, ("outside", value.name))
            if isinstance(value, (list, tuple)):
                return (type(value).__name__, *map(described, value))
            if isinstance(value, dict):
                return tuple((key, described(item)) for key, item in value.items())
            if isinstance(value, slice):
                return ("slice", described(value.start), described(value.stop), described(value.step))
            return (type(value).__name__, repr(value))

        return tuple(
            (node.op, self._target(node), described(node.args), described(dict(node.kwargs)), _known(node, path))
            for node in own
        )

    def _target(self, node: fx.Node) -> Hashable:
        if node.op == "call_module":
            return _module_kind(self.stage.root.get_submodule(str(node.target)))
        if node.op == "get_attr":
            value: Any = self.stage.root
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return _tensor_kind(value) if isinstance(value, torch.Tensor) else id(value)
        return node.target


def _paths(nodes: Sequence[fx.Node], depth: int) -> dict[fx.Node, str]:
    """Map nodes to the path of their block; a number or parameter goes with the first node that takes it."""
    found: dict[fx.Node, str] = {}
    for node in reversed(nodes):
        info: TracedNode | None = node.meta.get(INFO)
        if info is not None:
            found[node] = _block_path(info.module, depth)
        else:
            found[node] = next((found[user] for user in node.users if user in found), "")
    return found


def _block_path(module: str, depth: int) -> str:
    parts = module.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[depth - 1] + 1]) if len(numbered) >= depth else ""


def _known(node: fx.Node, path: str) -> Hashable:
    info: TracedNode | None = node.meta.get(INFO)
    if info is None:
        return None
    reads = tuple(name.removeprefix(f"{path}.") for name in info.reads)
    return info.node_class, info.tensors, reads, info.random, info.mutated, bool(info.writes), info.whole


def _module_kind(module: nn.Module) -> Hashable:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooks or not type(module).__module__.startswith("torch.nn"):
        return id(module)
    state = ((name, _tensor_kind(t)) for name, t in (*module.named_parameters(), *module.named_buffers()))
    return (type(module), repr(module), module.training, *state)


def _tensor_kind(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)


# -- expanding ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Place:
    """Where a storage was made: in which block of which run (0, 1 or 2 of the short graph), as its how many-th."""

    run: int
    block: int
    phase: str
    number: int


class _Names:
    """Storage ids of the whole graph: those of the short one, and new ones for the blocks that it lacks."""

    def __init__(self, runs: Sequence[Run], labels: Mapping[str, tuple[int, int]]) -> None:
        self.runs, self.labels = runs, labels
        self.places: dict[int, _Place] = {}
        self.templates: dict[_Place, int] = {}
        self.bytes: dict[int, int] = {}
        self._made: dict[tuple[int, int], int] = {}
        self._counts: dict[tuple[int, int, str], int] = {}
        self._next = 0

    def enter(self, storage: int, size: int, label: str, phase: str) -> None:
        """Note where a storage is made."""
        self._next = max(self._next, storage + 1)
        self.bytes[storage] = size
        where = self.labels.get(label)
        if where is None:
            return
        number = self._counts.setdefault((*where, phase), 0)
        self._counts[(*where, phase)] += 1
        place = self.places[storage] = _Place(*where, phase, number)
        if place.block == 1:
            self.templates[place] = storage

    def at(self, storage: int, run: int, position: int) -> int:
        """Return the storage that block ``position`` of a run means where the block in the short graph means this one.

        Position 0 is the first block, ``copies + 1`` the last.
        """
        place = self.places.get(storage)
        if place is None or place.run != run:
            return storage
        last = self.runs[run].copies + 1
        own = 0 if position == 0 else 2 if position == last else 1
        target = position + place.block - own
        if target in (0, last) and place.block == (0 if target == 0 else 2):
            return storage
        if not 0 < target < last:
            raise Uneven
        template = self.templates.get(replace(place, block=1))
        if template is None or self.bytes[template] != self.bytes[storage]:
            raise Uneven
        if target == 1:
            return template
        key = template, target
        if key not in self._made:
            self._made[key] = self._next
            self._next += 1
        return self._made[key]


def _labels(runs: Sequence[Run]) -> dict[str, tuple[int, int]]:
    """Map the stable names of the short graph's block nodes to run and block."""
    found: dict[str, tuple[int, int]] = {}
    for number, run in enumerate(runs):
        for block, nodes in enumerate((run.nodes[0], run.nodes[1], run.nodes[-1])):
            found |= {node.meta[INFO].name: (number, block) for node in nodes if INFO in node.meta}
    return found


def _renamed(run: Run, position: int) -> dict[str, str]:
    """Map the template's stable names to those of a block."""
    pairs = zip(run.nodes[1], run.nodes[position], strict=True)
    return {one.meta[INFO].name: other.meta[INFO].name for one, other in pairs if INFO in one.meta}


class _Traces:
    def __init__(self, runs: Sequence[Run], short: StageTrace) -> None:
        self.runs, self.short = runs, short
        self.labels = _labels(runs)
        self.names = _Names(runs, self.labels)
        phases = ("forward", short.forward), ("backward", short.backward), ("later", short.backward_later)
        for phase, steps in phases:
            for step in steps:
                for storage, count in step.changes:
                    if count > 0:
                        self.names.enter(storage, count, step.node, phase)

    def expanded(self) -> StageTrace:
        if not self.runs:
            return self.short
        short = self.short
        trace = replace(
            short,
            forward=tuple(self._steps(short.forward, backward=False)),
            backward=tuple(self._steps(short.backward, backward=True)),
            backward_later=tuple(self._steps(short.backward_later, backward=True)),
            gradients=self._held(short.gradients, parameter=True),
            kept=self._held(short.kept, parameter=False),
            split=dict(self._split()),
        )
        _check_balance(trace)
        return trace

    def _steps(self, steps: Sequence[Step], *, backward: bool) -> Iterator[Step]:
        seen: set[tuple[int, int]] = set()
        for where, group in groupby(steps, key=lambda step: self.labels.get(step.node)):
            own = list(group)
            if where is None:
                yield from map(self._outside, own)
                continue
            if where in seen:
                raise Uneven
            seen.add(where)
            run, block = where
            count = self.runs[run].copies
            positions: Sequence[int] = (0,) if block == 0 else (count + 1,) if block == 2 else range(1, count + 1)
            for position in reversed(positions) if backward else positions:
                yield from self._copies(own, run, position, renames=block == 1)

    def _outside(self, step: Step) -> Step:
        """Return a step outside the blocks; what it frees of the template's, it frees of all that it stands for."""
        changes: list[Change] = []
        for storage, count in step.changes:
            place = self.names.places.get(storage)
            if place is None or place.block != 1:
                changes.append((storage, count))
                continue
            copies = self.runs[place.run].copies
            changes += ((self.names.at(storage, place.run, position), count) for position in range(1, copies + 1))
        return Step(step.node, tuple(changes))

    def _copies(self, steps: Sequence[Step], run: int, position: int, *, renames: bool) -> Iterator[Step]:
        names = _renamed(self.runs[run], position) if renames else {}
        for step in steps:
            changes = tuple((self.names.at(storage, run, position), count) for storage, count in step.changes)
            yield Step(names.get(step.node, step.node), changes)

    def _held(self, held: Mapping[int, str], *, parameter: bool) -> dict[int, str]:
        found = dict(held)
        for storage, name in held.items():
            place = self.names.places.get(storage)
            if place is None or place.block != 1:
                continue
            run = self.runs[place.run]
            inside = name.removeprefix(f"{run.paths[1]}.")
            if parameter and inside == name:
                raise Uneven
            for position in range(2, run.copies + 1):
                own = f"{run.paths[position]}.{inside}"
                found[self.names.at(storage, place.run, position)] = own
        return found

    def _split(self) -> Iterator[tuple[str, Held]]:
        for name, held in self.short.split.items():
            where = self.labels.get(name)
            if where is None or where[1] != 1:
                yield name, held
                continue
            run = where[0]
            for position in range(1, self.runs[run].copies + 1):

                def own(storages: Iterable[int], run: int = run, position: int = position) -> tuple[int, ...]:
                    return tuple(self.names.at(storage, run, position) for storage in storages)

                renamed = _renamed(self.runs[run], position)[name]
                yield renamed, replace(held, saved=own(held.saved), gradients=own(held.gradients))


def _check_balance(trace: StageTrace) -> None:
    """Raise Uneven unless what is freed was allocated, and all is freed that is not kept."""
    for backward in (trace.backward, trace.backward_later):
        live: dict[int, int] = {}
        first = backward is trace.backward
        for step in (*trace.forward, *backward):
            for storage, count in step.changes:
                live[storage] = live.get(storage, 0) + count
        stays = {*trace.kept, *(trace.gradients if first else ())}
        if any(count and storage not in stays and (first or count > 0) for storage, count in live.items()):
            raise Uneven


class _Costs:
    def __init__(self, runs: Sequence[Run], short: Mapping[str, NodeCosts]) -> None:
        self.runs, self.short = runs, short
        self.names = _Names(runs, _labels(runs))
        entered: set[int] = set()
        for name, cost in short.items():
            for storage, size in (*cost.outputs.items(), *cost.saved.items()):
                if storage not in entered:
                    entered.add(storage)
                    self.names.enter(storage, size, name, "")

    def expanded(self) -> dict[str, NodeCosts]:
        if not self.runs:
            return dict(self.short)
        found: dict[str, NodeCosts] = {}
        for name, cost in self.short.items():
            where = self.names.labels.get(name)
            if where is None:
                found[name] = cost
                continue
            run, block = where
            last = self.runs[run].copies + 1
            for position in (0,) if block == 0 else (last,) if block == 2 else range(1, last):
                own = _renamed(self.runs[run], position)[name] if block == 1 else name
                place = _placing(self.names, run, position)
                found[own] = replace(cost, name=own, saved=place(cost.saved), outputs=place(cost.outputs))
        return found


def _placing(names: _Names, run: int, position: int) -> Callable[[Mapping[int, int]], dict[int, int]]:
    return lambda storages: {names.at(storage, run, position): size for storage, size in storages.items()}
