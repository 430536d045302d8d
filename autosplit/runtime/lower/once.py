"""What a process does once per step, before its cells and behind them, where these keep a graph each: as programs.

    home stage    makes a shared value, or has a tied parameter ── lends ──► stages of other processes
    hand-over     stages in descending order: gradients of what was lent come back; then the stage's own backward

A value is lent to later stages only. Every process goes through all stages in ascending order, and for a stage of
another process it lends what that takes, so both processes of a message come to it in one order. Where a process has
some stages only, every stage's shared nodes have a graph of their own, which begins at values that are cut off: a
value's gradient goes further when all its uses have given theirs (`Start.hand_over`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autosplit.runtime.lower.layout import Slot
from autosplit.runtime.lower.program import STATE, Program, ending_slots, slots_of
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.ops import ENDING, SHARED
from autosplit.runtime.transport import Transport
from autosplit.schedule.entry import Route
from autosplit.trace.recording.build import named


def emit_setup(lowered: Lowered, parts: Mapping[str, nn.Module], stages: Sequence[int], *, ending: bool) -> Any:
    """Return what runs once per step before the first cell of a process that has these stages, ascending.

    It takes the program's inputs and a transport, and returns the fields of a `Start`. ``parts`` are the modules of the
    program, on their lanes; ``ending``: what comes behind the last cell runs too, in the process of the last stage.
    """
    return _module(lowered, parts, _Setup(lowered, {name: name for name in parts}, stages, ending).graph)


def emit_ending(lowered: Lowered, parts: Mapping[str, nn.Module]) -> Any:
    """Return what runs once per step behind the last cell: the merges and the epilogue; it gives the flat outputs.

    It takes the program's own inputs, then ``kept`` of :func:`emit_setup`, then ``bundles``: per stage that gives the
    caller something, what it gave for each microbatch.
    """
    return _module(lowered, parts, _Ending(lowered, {name: name for name in parts}).graph)


def _module(lowered: Lowered, parts: Mapping[str, nn.Module], graph: fx.Graph) -> Any:
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module.__dict__[STATE] = lowered.traced.root
    module.__dict__.update(parts)
    module.graph = graph
    return module.forward


def lend(transport: Transport, source: int, target: int, when: int, values: Sequence[torch.Tensor]) -> None:
    """Send a stage of another process values that another stage has."""
    transport.send(Route(source, target, when), values)


def borrow(transport: Transport, source: int, target: int, when: int) -> Sequence[torch.Tensor]:
    """Receive values that a stage of another process has."""
    return [value for value in transport.recv(Route(source, target, when)) if value is not None]


def cut_off(value: torch.Tensor) -> torch.Tensor:
    """Return a value for a graph of its own, where it has a gradient."""
    return value.detach().requires_grad_() if value.requires_grad else value


class _Setup(Program):
    """What a process that has some stages does before its first cell."""

    def __init__(self, lowered: Lowered, attributes: Mapping[str, str], stages: Sequence[int], ending: bool) -> None:
        self.stages, self.ending, self.apart = stages, ending, len(stages) < len(lowered.stages)
        self.lent: dict[int, list[Any]] = {}
        self.borrowed: dict[int, list[Any]] = {}
        self.cut: dict[int, list[Any]] = {}
        super().__init__(lowered, attributes)

    def _begin(self) -> None:
        self.transport = named(self.graph, self.graph.placeholder("transport"), "transport")
        for stage in range(self.last_stage + 1):
            self._share(stage, SHARED, slots_of(self.layout, stage))
            if stage in self.stages:
                self._begin_stage(stage)
        slots = ending_slots(self.lowered) if self.ending else []
        self._share(self.last_stage, ENDING, slots)
        kept = tuple(self._cut_off(slot, self._value(slot), ENDING) for slot in slots if self.last_stage in self.stages)
        self.graph.output((self.splits, self.shared, kept, self.lent, self.borrowed, self.cut))  # type: ignore[arg-type]

    def _share(self, stage: int, when: int, slots: Sequence[Slot]) -> None:
        """Receive values whose homes are stages of other processes; send what a stage of another process takes."""
        homes = {self.layout.home[slot.value] for slot in slots if slot.value in self.layout.home}
        for home in sorted(homes):
            if (home in self.stages) == (stage in self.stages):
                continue
            way, taken = (home, stage, when), [slot for slot in slots if self.layout.home.get(slot.value) == home]
            if home in self.stages:
                values = [self._value(slot) for slot in taken]
                self._call(lend, (self.transport, *way, values), "lent")
                self.lent.setdefault(home, []).append((way, values))
            else:
                bundle = self._call(borrow, (self.transport, *way), f"from{home}")
                self.borrowed.setdefault(home, []).append((way, bundle))
                self.values.update({slot: self._item(bundle, index) for index, slot in enumerate(taken)})

    def _home(self, slot: Slot, stage: int) -> int | None:
        home = super()._home(slot, stage)
        return home if home is None or home in self.stages else stage

    def _taken(self, slot: Slot, stage: int) -> fx.Node:
        return self._cut_off(slot, self._placed(slot, stage), stage)

    def _cut_off(self, slot: Slot, value: fx.Node, stage: int) -> fx.Node:
        """Return a value for another graph; a stage's own is taken as it is."""
        home = self.layout.home.get(slot.value)
        if not self.apart or home not in self.stages or home == stage:
            return value
        leaf = self._call(cut_off, (value,), f"{slot.value.replace('.', '_')}_alone")
        self.cut.setdefault(stage, []).append((leaf, value, home))
        return leaf


class _Ending(Program):
    """The end of a program alone: what came before lies in two bundles."""

    def _begin(self) -> None:
        kept, bundles = (named(self.graph, self.graph.placeholder(n), n) for n in ("kept", "bundles"))
        self.values.update({slot: self._item(kept, i) for i, slot in enumerate(ending_slots(self.lowered))})
        for stage in self._giving():
            self._merge(stage, self._item(bundles, stage))
        self._finish()
