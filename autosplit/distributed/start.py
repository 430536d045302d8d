"""What one rank does once per step: shared values and tied parameters before its cells, their gradients behind them.

    home stage    makes a shared value, or has a tied parameter ── lends ──► stages of other ranks, once per step
    hand-over     stages in descending order: gradients of what was lent come back; then the stage's own backward

A value is lent to later stages only. Every rank goes through all stages: before its cells in ascending order, and for a
stage of another rank it lends what that takes; behind them in descending order, and for a stage of another rank it
sends the gradients of what that has lent. So both ranks of a message come to it in one order. Every stage's shared
nodes have a graph of their own, which begins at detached values: a value's gradient goes further only when all its uses
have given theirs, in the order of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import fx

from autosplit.distributed.messages import ENDING, SHARED
from autosplit.runtime.lower.layout import Layout, Slot
from autosplit.runtime.lower.program import ending_slots
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.ops import OUT, CellContext, fork, split, transfer
from autosplit.runtime.step.step import Pairs, Start, Step
from autosplit.runtime.transport import Transport
from autosplit.schedule.entry import Route
from autosplit.trace.graph import INFO


class Taken(NamedTuple):
    """Values that a stage took: detached, and as they are at their home; there is no such on another rank's."""

    leaf: torch.Tensor
    whole: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RankStart(Start):
    """What the cells of one rank begin with, and the way back of the gradients.

    Replicas of a stage do all this alike: what is lent comes from the first of a stage and goes to all of another.

    Attributes:
        stages: the rank's stages, ascending.
        lent: by stage, what went to stages of other ranks, and which way.
        borrowed: by the stage of another rank that made it, what came from there.
        taken: by stage, what its shared nodes took of this rank's own values.
        ended: what comes behind the last cell took of them.
        home: by the identity of a value that cells take, the stage that made it.
        transport: brings values and gradients.
        adding: adds the gradients of parameters that come inside to those of other replicas.
    """

    stages: Sequence[int]
    transport: Transport
    lent: dict[int, list[tuple[Route, list[torch.Tensor]]]] = field(default_factory=lambda: defaultdict(list))
    borrowed: dict[int, list[tuple[Route, list[torch.Tensor]]]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[int, list[Taken]] = field(default_factory=lambda: defaultdict(list))
    ended: list[Taken] = field(default_factory=list)
    home: dict[int, int] = field(default_factory=dict)
    adding: Callable[[], AbstractContextManager[None]] = nullcontext

    def hand_over(self, by_stage: Sequence[Pairs], backward: Callable[[Pairs], None]) -> None:
        """Give this rank's tensors their gradients, and other ranks those of what they lent."""
        with self.adding():
            self._hand_over(by_stage, backward)

    def _hand_over(self, by_stage: Sequence[Pairs], backward: Callable[[Pairs], None]) -> None:
        waiting: dict[int, Pairs] = defaultdict(list)
        back: dict[int, torch.Tensor] = {}
        for stage in reversed(self.stages):
            for tensor, gradient in by_stage[stage]:
                home = self.home.get(id(tensor), stage)
                if home in self.stages:
                    waiting[home].append((tensor, gradient))
                else:
                    back[id(tensor)] = gradient
            by_stage[stage].clear()
        self._pass_on(self.ended, waiting)
        for stage in sorted({*self.stages, *self.borrowed}, reverse=True):
            for route, values in self.borrowed.get(stage, ()):
                if any(value.requires_grad for value in values):
                    self.transport.send(route.back, [back.get(id(value), value.grad) for value in values])
            pairs = waiting.pop(stage, [])
            for route, values in self.lent[stage]:
                if any(value.requires_grad for value in values):
                    came = self.transport.recv(route.back)
                    pairs += [(v, g) for v, g in zip(values, came, strict=True) if g is not None]
            if pairs:
                backward(pairs)
            self._pass_on(self.taken[stage], waiting)

    def _pass_on(self, taken: Sequence[Taken], waiting: dict[int, Pairs]) -> None:
        for leaf, whole in taken:
            if leaf.grad is not None:
                waiting[self.home[id(whole)]].append((whole, leaf.grad))


def begin(step: Step, transport: Transport, *, ending: bool) -> RankStart:
    """Run what comes before the first cell of this rank.

    ``ending``: what comes behind the last cell runs too, on the last stage's rank.
    """
    return _Beginning(step, transport, ending).run()


class _Beginning:
    def __init__(self, step: Step, transport: Transport, ending: bool) -> None:
        self.step, self.transport, self.ending = step, transport, ending
        self.lowered, self.layout = step.lowered, step.lowered.layout
        self.stages = sorted(step.stages)
        self.last = len(self.lowered.stages) - 1
        self.inputs = {
            node.name: (node.meta[INFO], tensor)
            for node, tensor in zip(placeholders(self.lowered.traced.graph), step.tensors, strict=True)
        }
        self.values: dict[Slot, torch.Tensor] = {}
        self.start = RankStart({}, {}, (), stages=self.stages, transport=transport)

    def run(self) -> RankStart:
        start = self.start
        for stage in range(self.last + 1):
            if stage not in self.stages:
                self._lend(stage, SHARED, slots_of(self.layout, stage))
                continue
            self._tied(stage)
            self._borrow(stage, SHARED, slots_of(self.layout, stage))
            self._prologue(stage)
            layout, lane = self.layout.stages[stage], self.step.lanes[stage]
            if layout.inputs:
                infos, tensors = zip(*(self.inputs[slot.value] for slot in layout.inputs), strict=True)
                dims, changed = [info.tensors[0].batch_dim for info in infos], [info.mutated for info in infos]
                start.inputs[stage] = split(tensors, self.step.sizes, dims, lane, changed)
            if layout.shared:
                start.shared[stage] = tuple(self._value(slot, stage) for slot in layout.shared)
        slots = ending_slots(self.lowered) if self.ending else ()
        if self.last not in self.stages:
            self._lend(self.last, ENDING, slots)
        if not (self.ending and self.last in self.stages):
            return start
        self._borrow(self.last, ENDING, slots)
        return replace(start, kept=tuple(self._take(slot, self.last, start.ended) for slot in slots))

    def _tied(self, stage: int) -> None:
        """Make a use of its own for every user of the tied parameters whose home a stage is."""
        for key, uses in self.layout.given.items():
            if self.layout.home.get(key) == stage and uses:
                value = attrgetter(key)(self.lowered.traced.root)
                for use, copy in enumerate(fork(value, uses) if uses > 1 else (value,)):
                    self._keep(Slot(key, use), copy, stage)

    def _keep(self, slot: Slot, value: torch.Tensor, home: int) -> None:
        self.values[slot] = value
        self.start.home[id(value)] = home

    def _borrow(self, stage: int, when: int, slots: Sequence[Slot]) -> None:
        """Receive values whose homes are stages of other ranks."""
        for home, taken in self._by_home(slots).items():
            if home not in self.stages:
                route = Route(home, stage, when)
                values = [value for value in self.transport.recv(route) if value is not None]
                self.start.borrowed[home].append((route, values))
                for slot, value in zip(taken, values, strict=True):
                    self._keep(slot, value, home)

    def _by_home(self, slots: Sequence[Slot]) -> dict[int, list[Slot]]:
        by_home: dict[int, list[Slot]] = {}
        for slot in slots:
            if slot.value in self.layout.home:
                by_home.setdefault(self.layout.home[slot.value], []).append(slot)
        return dict(sorted(by_home.items()))

    def _lend(self, stage: int, when: int, slots: Sequence[Slot]) -> None:
        """Send what a stage of another rank takes of this rank's stages."""
        for home, taken in self._by_home(slots).items():
            if home in self.stages:
                values = [self.values[slot] for slot in taken]
                route = Route(home, stage, when)
                self.transport.send(route, values)
                self.start.lent[home].append((route, values))

    def _prologue(self, stage: int) -> None:
        module, prologue = self.lowered.prologues[stage], self.layout.prologues[stage]
        if module is None:
            return
        bundle = tuple(self._take(slot, stage, self.start.taken[stage]) for slot in prologue.takes)
        feeds = {**self.step.lengths, "rows": self.step.rows, "shared": bundle}
        feeds["key"] = CellContext(self.step.state, SHARED)
        with self.step.lanes[stage].active():
            outputs = module(*[feeds[name] for name in module.takes])
        for slot, value in zip(prologue.gives, outputs, strict=True):
            self._keep(slot, value, stage)

    def _value(self, slot: Slot, stage: int) -> torch.Tensor:
        """Return a value on a stage's device; inputs are the same for every use."""
        if slot in self.values:
            return self.values[slot]
        tensor, lane = self.inputs[slot.value][1], self.step.lanes[stage]
        return transfer((tensor,), lane.origin(tensor), lane)[0]

    def _take(self, slot: Slot, stage: int, taken: list[Taken]) -> torch.Tensor:
        """Return a value for a graph of its own; one that another rank lends has none here.

        A stage's own is taken as it is: what comes back for it comes in the same backward.
        """
        value = self._value(slot, stage)
        home = self.start.home[id(value)] if slot in self.values else None
        if home not in self.stages or not value.requires_grad or (home == stage and taken is not self.start.ended):
            return value
        leaf = value.detach().requires_grad_()
        taken.append(Taken(leaf, value))
        return leaf


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a recording that are tensors."""
    return [node for node in graph.nodes if node.op == "placeholder" and INFO in node.meta]


def slots_of(layout: Layout, stage: int) -> list[Slot]:
    """Return what a stage takes once per step: its shared nodes, and its cells."""
    return [*layout.prologues[stage].takes, *layout.stages[stage].shared]


def pairs_of(lowered: Lowered, ranks: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Return the ranks between which anything travels, as sender and receiver; gradients go the other way.

    ``ranks`` are those of each stage's replicas, which tell each other losses and gradients.
    """
    layout, last = lowered.layout, len(ranks) - 1
    routes = {(source, stage) for stage, region in enumerate(layout.stages) for source in region.received}
    routes |= {(stage, last) for stage, region in enumerate(layout.stages) if OUT in region.sent}
    slots = [(stage, slot) for stage in range(len(ranks)) for slot in slots_of(layout, stage)]
    slots += [(last, slot) for slot in ending_slots(lowered)]
    routes |= {(layout.home[slot.value], stage) for stage, slot in slots if slot.value in layout.home}
    pairs = {pair for source, target in routes for pair in product(ranks[source], ranks[target])}
    pairs |= {pair for members in ranks for pair in product(members, members)}
    return {pair for a, b in pairs for pair in ((a, b), (b, a)) if a != b}
