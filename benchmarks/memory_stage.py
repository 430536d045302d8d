"""The peak of each of four stages under its schedule: predicted on fake tensors, measured with the stage run alone.

    lane of stage 1 under 1F1B, M = 8      1F0 1F1 1F2 1B0 1F3 1B1 ...
    forward      a boundary value arrives: a leaf; the results are held
    backward     a cotangent arrives; gradients are added in place; results, boundary value and its gradient go

A stage holds its own parameters, a tied one too where another stage has the same; gradients are None at the start.
A value that only passes through a stage does not enter it: its producer sends it to whom it is for.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autosplit.memory.replay import StaticBytes, replay
from autosplit.profile.allocations import Allocations
from autosplit.profile.stage_graph import StageGraph, stage_graph
from autosplit.profile.stage_trace import How
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build
from autosplit.trace.graph import INFO
from benchmarks.families import Family
from benchmarks.memory_subject import (
    Line,
    Precision,
    Recompute,
    Subject,
    autocast,
    held_by,
    recomputed,
    traces,
)

STAGES, MICROBATCHES = 4, 8
_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Lanes:
    """How the stages are run; ``rows`` are those of a microbatch."""

    schedule: str
    precision: Precision
    recompute: Recompute
    rows: int


class Stage(nn.Module):
    """Some parts of a family's chain in a row; the last stage takes the target too, and ends with the loss."""

    def __init__(self, parts: Sequence[nn.Module], loss: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.parts, self.loss = nn.ModuleList(parts), loss

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        target = state[-1]
        if self.loss is not None:
            state = state[:-1]
        for part in self.parts:
            result = part(*state)
            state = result if isinstance(result, tuple) else (result,)
        return state if self.loss is None else (self.loss(state[0], target),)


@dataclass(frozen=True)
class Alone:
    """One stage of real parameters, and what enters it.

    Attributes:
        state: values as the stage takes them; one that comes twice is the same tensor.
        differentiable: whether those of floating point want a gradient.
        used: by value, whether the stage computes with it.
    """

    module: Stage
    state: tuple[Tensor, ...]
    differentiable: bool
    used: tuple[bool, ...]

    def arrive(self) -> tuple[Tensor, ...]:
        """Return the state with a copy of every value that is used, as it comes from another device."""
        copies = {
            id(value): value.clone().requires_grad_(self.differentiable and value.is_floating_point())
            for value, used in zip(self.state, self.used, strict=True)
            if used
        }
        return tuple(copies.get(id(value), value) for value in self.state)


def stage_lines(subject: Subject, lanes: Lanes, *, known: Mapping[str, int] = _NOTHING) -> list[Line]:
    """Return a line per stage; what was measured before is ``known`` by cell."""
    family = subject.family
    parts = family.parts(subject.model.model)
    predicted = predicted_stages(subject, lanes)
    cells = stage_cells(family.name, lanes)
    measured = [known[cell] for cell in cells if cell in known]
    if len(measured) < STAGES:
        alone = stages_alone(family, rows=lanes.rows, precision=lanes.precision)
        measured = [measured_stage(family, stage, lanes, number=number) for number, stage in enumerate(alone)]
    return [
        Line(
            cell=cells[number],
            kind="stage",
            rows=lanes.rows,
            asked=0.02 if family.kind == "transformer" else 0.05,
            static_bytes=sum(held_by(parts[first:last])),
            predicted_bytes=predicted[number],
            measured_bytes=measured[number],
        )
        for number, (first, last) in enumerate(bounds(len(parts)))
    ]


def stage_cells(family: str, lanes: Lanes) -> list[str]:
    """Return the names of the cells of four stages."""
    way = f"{family} {lanes.precision} recompute={lanes.recompute} {lanes.schedule}"
    return [f"stages {way} stage {number}" for number in range(STAGES)]


def bounds(parts: int) -> list[tuple[int, int]]:
    """Return the parts of each stage, first and one past the last: as many in each as goes."""
    places = [round(number * parts / STAGES) for number in range(STAGES + 1)]
    return list(itertools.pairwise(places))


# -- predicted ---------------------------------------------------------------------------------------------------------
def predicted_stages(subject: Subject, lanes: Lanes) -> tuple[int, ...]:
    """Return the peak of each stage, from the recording alone."""
    parts = subject.family.parts(subject.model.model)
    units = subject.units if lanes.recompute == "block" else ()
    found, static = {}, []
    for number, (first, last) in enumerate(bounds(len(parts))):
        stage = stage_graph(subject.graph, _names(subject, number))
        wanted = {node.meta[INFO].name: number > 0 for node in stage.inputs}
        how = How(lanes.rows, input_grads=wanted, units=_within(units, stage), whole=lanes.recompute == "always")
        with autocast(lanes.precision):
            found[number] = traces(stage, how, recompute=lanes.recompute)
        static.append(StaticBytes(parameters=held_by(parts[first:last])))
    schedule = build(lanes.schedule, stages=STAGES, microbatches=MICROBATCHES)
    return replay(schedule, found, static).peak_bytes


def _names(subject: Subject, stage: int) -> set[str]:
    """Return the nodes of a stage: those of its parts' modules; the loss is the last one's."""
    paths = {id(module): path for path, module in subject.model.named_modules()}
    parts = [paths[id(part)] for part in subject.family.parts(subject.model.model)]
    stage_of = {parts[i]: number for number, ends in enumerate(bounds(len(parts))) for i in range(*ends)}

    def belongs(module: str) -> int:
        while module and module not in stage_of:
            module = module.rpartition(".")[0]
        return stage_of.get(module, STAGES - 1)

    return {info.name for _, info in subject.graph.compute_nodes() if belongs(info.module) == stage}


def _within(units: Sequence[str], stage: StageGraph) -> tuple[str, ...]:
    modules = {info.module for _, info in stage.computing()}
    return tuple(unit for unit in units if any(f"{module}.".startswith(f"{unit}.") for module in modules))


# -- measured ----------------------------------------------------------------------------------------------------------
def stages_alone(family: Family, *, rows: int, precision: Precision) -> list[Alone]:
    """Return the stages of a family with what enters each in a real forward."""
    torch.manual_seed(0)
    parts = family.parts(family.make().train())
    state, target = family.batch(rows), family.target(rows)
    found = []
    for number, (first, last) in enumerate(bounds(len(parts))):
        is_last = number == STAGES - 1
        module = Stage(parts[first:last], family.loss if is_last else None)
        entering = (*state, target) if is_last else state
        stage = Alone(module, entering, differentiable=number > 0, used=(True,) * len(entering))
        with torch.no_grad(), autocast(precision):
            state = tuple(value.detach() if value.is_floating_point() else value for value in module(*entering))
        found.append(_with_used(stage, precision))
    return found


def _with_used(stage: Alone, precision: Precision) -> Alone:
    """Return a stage that knows which values it computes with: those that a backward reaches."""
    lane = _Lane(stage, recompute="never")
    with autocast(precision):
        leaves = lane.forward(0)
        lane.backward(0, sends=False)
    stage.module.zero_grad(set_to_none=True)
    return replace(stage, used=tuple(not leaf.requires_grad or leaf.grad is not None for leaf in leaves))


def measured_stage(family: Family, stage: Alone, lanes: Lanes, *, number: int) -> int:
    """Return a stage's peak over its lane, by the allocator's own events."""
    lane = build(lanes.schedule, stages=STAGES, microbatches=MICROBATCHES).lanes[number]
    blocks = family.blocks(stage.module) if lanes.recompute == "block" else []
    run = _Lane(stage, recompute=lanes.recompute)
    with recomputed(blocks), autocast(lanes.precision):
        run.act(Action(number, "F", 0))
        run.act(Action(number, "B", 0))
        stage.module.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()
        gc.collect()
        with Allocations() as found:
            for action in lane:
                run.act(action)
        stage.module.zero_grad(set_to_none=True)
    return sum(held_by([stage.module])) + found.peak_bytes


@dataclass(frozen=True)
class _Held:
    """What a microbatch holds between its forward and its backward."""

    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class _Lane:
    """A stage's actions, run alone: what others would send is made here."""

    def __init__(self, stage: Alone, *, recompute: Recompute) -> None:
        self.stage, self.whole = stage, recompute == "always"
        self.held: dict[int, _Held] = {}

    def act(self, action: Action) -> None:
        if action.kind == "F":
            self.forward(action.microbatch)
        else:
            self.backward(action.microbatch)

    def forward(self, microbatch: int) -> tuple[Tensor, ...]:
        leaves = self.stage.arrive()
        aliases = {id(leaf): leaf[...] if leaf.requires_grad else leaf for leaf in leaves}
        lent = tuple(aliases[id(leaf)] for leaf in leaves)
        module = self.stage.module
        results = checkpoint(module, *lent, use_reentrant=False) if self.whole else module(*lent)
        passing = {id(value) for value in lent}
        outputs = {id(result): result for result in results if id(result) not in passing}
        self.held[microbatch] = _Held(leaves, tuple(outputs.values()))
        return leaves

    def backward(self, microbatch: int, *, sends: bool = True) -> None:
        held = self.held.pop(microbatch)
        cotangents = [torch.empty_like(output).fill_(1e-3) for output in held.outputs]
        torch.autograd.backward(held.outputs, cotangents)
        if sends:
            for leaf in held.leaves:
                leaf.grad = None
