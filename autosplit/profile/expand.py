"""Copy the steps of a template block to the blocks that it stands for, with storages of their own.

A storage is identified by where it was allocated: its block, the phase, and its number among these. A storage of the
template becomes, for block ``i``, the one with the same phase and number in block ``i``, the previous or the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from autosplit.profile.types import NodeProfile
from autosplit.schedule.memory.pieces import Change, NodeStep, StageTrace, WeightNeeds
from autosplit.trace.graph import INFO

_COPY = 1 << 40
"""What a storage of a block's copy is above that of the template, times the number of the block."""


class Uneven(Exception):
    """What the blocks did does not fit together: the whole graph must be run."""


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks one after the other: their paths, and the nodes of each, in order."""

    paths: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]

    @property
    def copies(self) -> int:
        """How many blocks the template stands for."""
        return len(self.paths) - 2

    def without(self, behind: int) -> BlockRun:
        """Return the run without its last blocks."""
        count = len(self.paths) - behind
        return BlockRun(self.paths[:count], self.nodes[:count])


@dataclass(frozen=True)
class _Origin:
    """Where a storage was allocated: run, block (0, 1 or 2 of the short graph), phase, and its number among these."""

    run: int
    block: int
    phase: str
    number: int


class _Names:
    """Storage ids of the whole graph: those of the short one, and new ones for the blocks that it lacks."""

    def __init__(self, runs: Sequence[BlockRun], labels: Mapping[str, tuple[int, int]]) -> None:
        self.runs, self.labels = runs, labels
        self.origins: dict[int, _Origin] = {}
        self.templates: dict[_Origin, int] = {}
        self.bytes: dict[int, int] = {}
        self._template_of: dict[int, int] = {}
        self._counts: dict[tuple[int, int, str], int] = {}

    def enter(self, storage: int, size: int, label: str, phase: str) -> None:
        """Note where a storage is made."""
        self.bytes[storage] = size
        where = self.labels.get(label)
        if where is None:
            return
        number = self._counts.setdefault((*where, phase), 0)
        self._counts[(*where, phase)] += 1
        origin = self.origins[storage] = _Origin(*where, phase, number)
        if origin.block == 1:
            self.templates[origin] = storage

    def at(self, storage: int, run: int, position: int) -> int:
        """Return the storage that block ``position`` of a run means where the block in the short graph means this one.

        Position 0 is the first block, ``copies + 1`` the last.
        """
        origin = self.origins.get(storage)
        if origin is None or origin.run != run:
            return storage
        last = self.runs[run].copies + 1
        block = 0 if position == 0 else 2 if position == last else 1
        target = position + origin.block - block
        if target in (0, last) and origin.block == (0 if target == 0 else 2):
            return storage
        if not 0 < target < last:
            raise Uneven
        template = self._template_of.get(storage)
        if template is None:
            template = self.templates.get(replace(origin, block=1))
            if template is None or self.bytes[template] != self.bytes[storage]:
                raise Uneven
            self._template_of[storage] = template
        if target == 1:
            return template
        return template + target * _COPY


def _labels(runs: Sequence[BlockRun]) -> dict[str, tuple[int, int]]:
    """Map the stable names of the short graph's block nodes to run and block."""
    labels: dict[str, tuple[int, int]] = {}
    for number, run in enumerate(runs):
        for block, nodes in enumerate((run.nodes[0], run.nodes[1], run.nodes[-1])):
            labels |= {node.meta[INFO].name: (number, block) for node in nodes if INFO in node.meta}
    return labels


def _renames(runs: Sequence[BlockRun]) -> dict[tuple[int, int], dict[str, str]]:
    """Map runs and positions to the names of that block by those of the template."""
    return {
        (n, position): _renamed(run, position) for n, run in enumerate(runs) for position in range(1, run.copies + 1)
    }


def _renamed(run: BlockRun, position: int) -> dict[str, str]:
    """Map the template's stable names to those of a block."""
    pairs = zip(run.nodes[1], run.nodes[position], strict=True)
    return {template.meta[INFO].name: other.meta[INFO].name for template, other in pairs if INFO in template.meta}


class Traces:
    """A short stage's trace, on its way to be the whole stage's."""

    def __init__(self, runs: Sequence[BlockRun], short: StageTrace) -> None:
        self.runs, self.short = runs, short
        self.labels = _labels(runs)
        self.renames = _renames(runs)
        self.names = _Names(runs, self.labels)
        phases = ("forward", short.forward), ("backward", short.backward), ("later", short.backward_later)
        for phase, steps in phases:
            for step in steps:
                for storage, count in step.changes:
                    if count > 0:
                        self.names.enter(storage, count, step.node, phase)

    def expanded(self) -> StageTrace:
        """Return the whole stage's trace; raises Uneven."""
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

    def _steps(self, steps: Sequence[NodeStep], *, backward: bool) -> Iterator[NodeStep]:
        """Yield the steps of all blocks; a pass over a run begins at its first block or at its last."""
        came_from: dict[int, int] = {}
        for where, group in groupby(steps, key=lambda step: self.labels.get(step.node)):
            group_steps = list(group)
            if where is None:
                yield from map(self._outside, group_steps)
                continue
            run, block = where
            before, came_from[run] = came_from.get(run, 2 if backward else 0), block
            if block == before == 1:
                raise Uneven
            count = self.runs[run].copies
            if block != 1:
                yield from self._copies(group_steps, run, 0 if block == 0 else count + 1, renames=False)
                continue
            positions = range(1, count + 1)
            for position in positions if before == 0 else reversed(positions):
                yield from self._copies(group_steps, run, position, renames=True)

    def _outside(self, step: NodeStep) -> NodeStep:
        """Return a step outside the blocks; a storage of the template that it frees is freed of all its copies."""
        changes: list[Change] = []
        for storage, count in step.changes:
            origin = self.names.origins.get(storage)
            if origin is None or origin.block != 1:
                changes.append((storage, count))
                continue
            copies = self.runs[origin.run].copies
            changes += ((self.names.at(storage, origin.run, position), count) for position in range(1, copies + 1))
        return NodeStep(step.node, tuple(changes))

    def _copies(self, steps: Sequence[NodeStep], run: int, position: int, *, renames: bool) -> Iterator[NodeStep]:
        names = self.renames[run, position] if renames else {}
        for step in steps:
            changes = tuple((self.names.at(storage, run, position), count) for storage, count in step.changes)
            yield NodeStep(names.get(step.node, step.node), changes)

    def _held(self, held: Mapping[int, str], *, parameter: bool) -> dict[int, str]:
        expanded, uses = dict(held), Counter(held.values())
        for storage, name in held.items():
            origin = self.names.origins.get(storage)
            if origin is None or origin.block != 1:
                continue
            run = self.runs[origin.run]
            inside = name.removeprefix(f"{run.paths[1]}.")
            lent = inside == name and uses[name] > 1  # a value of which every block's use has a gradient
            if parameter and inside == name and not lent:
                raise Uneven
            for position in range(2, run.copies + 1):
                renamed = name if lent else f"{run.paths[position]}.{inside}"
                expanded[self.names.at(storage, origin.run, position)] = renamed
        return expanded

    def _split(self) -> Iterator[tuple[str, WeightNeeds]]:
        for name, held in self.short.split.items():
            where = self.labels.get(name)
            if where is None or where[1] != 1:
                yield name, held
                continue
            run = where[0]
            for position in range(1, self.runs[run].copies + 1):

                def of_block(storages: Iterable[int], run: int = run, position: int = position) -> tuple[int, ...]:
                    return tuple(self.names.at(storage, run, position) for storage in storages)

                renamed = self.renames[run, position][name]
                yield renamed, replace(held, saved=of_block(held.saved), gradients=of_block(held.gradients))


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


def expanded_costs(
    runs: Sequence[BlockRun], short: Mapping[str, NodeProfile], *, of: Iterable[str]
) -> dict[str, NodeProfile]:
    """Return the costs of nodes by those ``of`` some of a short graph: each run one after the other. Raises Uneven."""
    names, renames = _Names(runs, _labels(runs)), _renames(runs)
    entered: set[int] = set()
    for name, cost in short.items():
        for storage, size in (*cost.outputs.items(), *cost.saved.items()):
            if storage not in entered:
                entered.add(storage)
                names.enter(storage, size, name, "")
    costs: dict[str, NodeProfile] = {}
    for name in of:
        cost, where = short[name], names.labels.get(name)
        if where is None:
            costs[name] = cost
            continue
        run, block = where
        last = runs[run].copies + 1
        for position in (0,) if block == 0 else (last,) if block == 2 else range(1, last):
            copy = renames[run, position][name] if block == 1 else name
            saved, outputs = (
                {names.at(storage, run, position): size for storage, size in storages.items()}
                for storages in (cost.saved, cost.outputs)
            )
            costs[copy] = replace(cost, name=copy, saved=saved, outputs=outputs)
    return costs
