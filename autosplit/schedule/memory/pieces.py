"""What is alive over a microbatch, as changes, and the pieces of it that a schedule puts in order.

Changes are the common language of the fake pass, the replay and the allocator. A stage's trace:

```
    forward    +x +a +b -a            what a node allocates and frees, in order
    backward   +db -b +da … -x        the same ids: a storage that the forward left is freed by the backward
```

It is cut into what one action each does to a device's memory:

```
    F   forward                     leaves what the backward needs
    B   backward                    frees it, leaves gradients (microbatch 0) or adds to them (the others)
    I   input gradient only         keeps what the weights' gradients need: saved storages, output gradients
    W   the weights' gradients      frees that
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from autosplit.schedule.action import Kind

Change = tuple[int, int]
"""``(storage, bytes)``: bytes above zero are allocated, below zero freed (the same number, negative)."""


@dataclass(frozen=True, slots=True)
class NodeStep:
    """What one node did in one pass; ``node`` is its stable name, "" for changes that belong to no node."""

    node: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class WeightNeeds:
    """What a node's weight gradient needs when it is made after the input gradient (zero bubble).

    Attributes:
        saved: saved storages that the weight gradient needs.
        cotangent_bytes: the gradient of the node's output, which lives until then.
        gradients: storages of the parameter gradients that it makes: keys of ``StageTrace.gradients``.
    """

    saved: tuple[int, ...]
    cotangent_bytes: int
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class StageTrace:
    """One stage's work on one microbatch under one way to recompute.

    Storage ids are unique within a trace; forward and backward together free all that they allocate but ``gradients``
    and ``kept``.

    Attributes:
        forward: begins with the boundary inputs that arrive (node "").
        backward: of the first microbatch, which finds no gradients. Begins with the cotangents that arrive, ends with
            the release of outputs, inputs and the inputs' gradients, which were sent away (node "").
        backward_later: of any other: every parameter's gradient is made, added in place and freed.
        gradients: storages that ``backward`` leaves: parameter gradients, by the parameter's name.
        kept: other storages that stay until the step ends and are allocated by the first forward only (casts that
            autocast caches), by name.
        split: by node whose weight gradient can wait, what it needs.
        guessed_bytes: the most scratch of one kernel, among what is allocated and freed, that nobody measured.
    """

    forward: tuple[NodeStep, ...]
    backward: tuple[NodeStep, ...]
    backward_later: tuple[NodeStep, ...]
    gradients: Mapping[int, str] = field(default_factory=dict)
    kept: Mapping[int, str] = field(default_factory=dict)
    split: Mapping[str, WeightNeeds] = field(default_factory=dict)
    guessed_bytes: int = 0


_GATHERED = -1
"""The storage of what a rank gathers for a node."""


@dataclass(frozen=True)
class RankParts:
    """Which part of a stage's storages a rank has: by the node that makes them, or by the parameter of a gradient.

    ``forward`` and ``backward`` are for what a node makes in each pass, ``border`` for what arrives from other stages;
    what is not named is whole. ``gradients``: the part of every gradient that data-parallel ranks keep beside that.
    ``gathered``: the bytes that a node has beside that while it runs.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    states: Mapping[str, float]
    border: float = 1.0
    gradients: float = 1.0
    gathered: Mapping[str, int] = field(default_factory=dict)

    def of(self, trace: StageTrace) -> StageTrace:
        """Return a rank's part of a trace."""
        share_of = {storage: self.gradients * self.states.get(name, 1.0) for storage, name in trace.gradients.items()}

        def of_rank(steps: tuple[NodeStep, ...], nodes: Mapping[str, float]) -> tuple[NodeStep, ...]:
            scaled = []
            for step in steps:
                share = nodes.get(step.node, 1.0) if step.node else self.border
                changes = ((storage, count * share_of.setdefault(storage, share)) for storage, count in step.changes)
                rounded = tuple((storage, round(count)) for storage, count in changes)
                if count := self.gathered.get(step.node):
                    rounded = (_GATHERED, count), *rounded, (_GATHERED, -count)
                scaled.append(NodeStep(step.node, rounded))
            return tuple(scaled)

        forward = of_rank(trace.forward, self.forward)
        backward, later = (of_rank(steps, self.backward) for steps in (trace.backward, trace.backward_later))
        return replace(trace, forward=forward, backward=backward, backward_later=later)


Recompute = Literal["never", "block", "always", "except_last"]
MemoryKind = Literal["parameters", "optimizer", "gradients", "activations", "casts", "whole_batch", "transient"]
"""What bytes are for.

``parameters`` with buffers and copies of tied ones; ``activations`` with boundary values and what waits for W;
``casts`` that autocast caches; ``whole_batch`` values such as random masks; ``transient`` what the running action
frees itself, recomputed storages and a gradient that is being added among it.
"""


@dataclass(frozen=True)
class StageTraces:
    """A stage's traces: the plain one, and that of the recomputed microbatches (per block, or the stage as a whole).

    Under "except_last" the last microbatch of a step runs the plain one, whose backward follows at once.
    """

    recompute: Recompute = "never"
    never: StageTrace | None = None
    recomputed: StageTrace | None = None

    def pieces(self, *, last: bool) -> TracePieces:
        """Return the pieces of the trace that a microbatch runs; ``last``: it is the last one of the step."""
        plain = self.recompute == "never" or (last and self.recompute == "except_last")
        return self._plain if plain else self._recomputed

    @cached_property
    def _plain(self) -> TracePieces:
        assert self.never is not None
        return TracePieces(self.never)

    @cached_property
    def _recomputed(self) -> TracePieces:
        assert self.recomputed is not None
        return TracePieces(self.recomputed, whole=True)

    @property
    def guessed_bytes(self) -> int:
        """The most scratch of one kernel that nobody measured."""
        return max(trace.guessed_bytes for trace in (self.never, self.recomputed) if trace is not None)


@dataclass(frozen=True)
class Piece:
    """One action's steps, and what they come to, above what lived when it began.

    Attributes:
        kinds: kind of each storage that is not transient.
        at_peak: bytes by kind when the most was alive.
        left: bytes by kind after the action; below zero where it freed what earlier actions left.
    """

    steps: tuple[NodeStep, ...]
    kinds: Mapping[int, MemoryKind]
    peak_bytes: int
    at_peak: Mapping[MemoryKind, int]
    left: Mapping[MemoryKind, int]

    @cached_property
    def played(self) -> tuple[tuple[int, int, MemoryKind], ...]:
        """Every change of some bytes, with the kind of its storage."""
        kinds = self.kinds
        return tuple((s, count, kinds.get(s, "transient")) for s, count in _changes(self.steps) if count)


class TracePieces:
    """The pieces of one trace, each made when it is first asked for.

    ``whole``: a microbatch that runs again in its backward puts nothing off, so that I is all of B, and W nothing.
    """

    def __init__(self, trace: StageTrace, *, whole: bool = False) -> None:
        self._trace = trace
        self._whole = whole
        self._made: dict[tuple[Kind, bool, bool], Piece] = {}

    def piece(self, kind: Kind, *, first: bool, keeps: bool = True) -> Piece:
        """Return what an action does.

        Args:
            kind: of the action.
            first: it belongs to the stage's first microbatch, which finds no gradients and makes what is ``kept``.
            keeps: whether a backward follows; otherwise the forward frees all that it allocated.
        """
        key = (kind, first, keeps)
        if key not in self._made:
            self._made[key] = self._make(kind, first=first, keeps=keeps)
        return self._made[key]

    def _make(self, kind: Kind, *, first: bool, keeps: bool) -> Piece:
        trace = self._trace
        if self._whole and kind in "IW":
            return self.piece("B", first=first) if kind == "I" else _measured((), {})
        if kind == "F":
            steps = trace.forward if keeps else (*trace.forward, self._release)
        elif kind == "B":
            steps = trace.backward if first else trace.backward_later
        elif kind == "I":
            steps = self._split.input if first else _added(self._split.input, trace.gradients)
        else:
            steps = self._split.weight if first else _added(self._split.weight, trace.gradients)
        if not first:
            steps = _without(steps, trace.kept)
        kinds: dict[int, MemoryKind] = dict.fromkeys(self._saved if keeps else (), "activations")
        kinds |= dict.fromkeys(trace.kept, "casts")
        if kind in "IW":
            kinds |= dict.fromkeys(self._split.waiting, "activations")
        if first:
            kinds |= dict.fromkeys(trace.gradients, "gradients")
        elif kind == "B":
            kinds |= dict.fromkeys(self._exchanged, "gradients")
        return _measured(steps, kinds)

    @cached_property
    def _saved(self) -> Mapping[int, int]:
        """Storages that the forward leaves to the backward, with their bytes."""
        return {key: count for key, count in alive_after(self._trace.forward).items() if key not in self._trace.kept}

    @cached_property
    def _exchanged(self) -> frozenset[int]:
        """Gradients that a later backward frees, and the new sums that it leaves in their place."""
        changes = tuple(_changes(self._trace.backward_later))
        new = {storage for storage, count in changes if count > 0}
        freed = {storage for storage, count in changes if count < 0}
        return frozenset((new - freed - self._trace.kept.keys()) | ((freed - new) & self._trace.gradients.keys()))

    @cached_property
    def _release(self) -> NodeStep:
        return NodeStep("", tuple((storage, -count) for storage, count in self._saved.items()))

    @cached_property
    def _split(self) -> Split:
        return split(self._trace)


@dataclass(frozen=True)
class Split:
    """A backward in two: the input's gradient, the weights' gradients, and the storages that only wait in between."""

    input: tuple[NodeStep, ...]
    weight: tuple[NodeStep, ...]
    waiting: tuple[int, ...]


def split(trace: StageTrace) -> Split:
    """Return the first microbatch's backward as I and W (Qi et al. 2023, arXiv 2401.10241, section 2).

    For every node of ``trace.split``, W makes its parameters' gradients, so I frees neither what they are made from
    nor the gradient of the node's output. Where that gradient is a storage that the node's own step frees, the storage
    stays; where it lives on elsewhere, W holds as many bytes from the node's last step on.
    """
    last_step = {step.node: index for index, step in enumerate(trace.backward) if step.node in trace.split}
    order = sorted(last_step, key=lambda node: last_step[node])
    new = {storage: count for storage, count in _changes(trace.backward) if count > 0}
    freed = {storage for storage, count in _changes(trace.backward) if count < 0}
    last_reader = {storage: node for node in order for storage in trace.split[node].saved if storage in freed}
    maker = {storage: node for node in reversed(order) for storage in trace.split[node].gradients if storage in new}
    cotangents = _cotangents(trace, order=order, taken=last_reader.keys() | maker.keys(), new=new)
    moved = {**last_reader, **{storage: node for node, storage in cotangents.items()}}
    fresh = iter(range(1 + max((0, *new, *alive_after(trace.forward))), 1 << 62))
    copies = {node: next(fresh) for node in order if node not in cotangents and trace.split[node].cotangent_bytes}
    input_steps = []
    makes: dict[str, list[Change]] = {node: [] for node in order}
    frees: dict[str, list[Change]] = {node: [] for node in order}
    for index, step in enumerate(trace.backward):
        stays: list[Change] = []
        for storage, count in step.changes:
            if count > 0 and storage in maker:
                makes[maker[storage]].append((storage, count))
            elif count < 0 and storage in moved:
                frees[moved[storage]].append((storage, count))
            else:
                stays.append((storage, count))
        if step.node in copies and last_step[step.node] == index:
            count = trace.split[step.node].cotangent_bytes
            stays.append((copies[step.node], count))
            frees[step.node].append((copies[step.node], -count))
        input_steps.append(NodeStep(step.node, tuple(stays)))
    waiting = (*moved, *copies.values())
    return Split(tuple(input_steps), tuple(NodeStep(node, (*makes[node], *frees[node])) for node in order), waiting)


def _cotangents(
    trace: StageTrace, *, order: Iterable[str], taken: Iterable[int], new: Mapping[int, int]
) -> dict[str, int]:
    """Return, by node, the storage that its own steps free and that is as large as its output's gradient."""
    used = {_GATHERED, *taken}
    cotangents: dict[str, int] = {}
    for node in order:
        wanted = trace.split[node].cotangent_bytes
        for step in trace.backward:
            if step.node == node and wanted and node not in cotangents:
                fits = (key for key, count in step.changes if -count == wanted and key in new and key not in used)
                if (storage := next(fits, None)) is not None:
                    cotangents[node] = storage
                    used.add(storage)
    return cotangents


def _added(steps: Iterable[NodeStep], gradients: Mapping[int, str]) -> tuple[NodeStep, ...]:
    """Return steps in which parameter gradients are added to the existing ones, and freed."""
    return tuple(NodeStep(step.node, tuple(_adding(step.changes, gradients))) for step in steps)


def _adding(changes: tuple[Change, ...], gradients: Mapping[int, str]) -> Iterator[Change]:
    added = [(storage, count) for storage, count in changes if count > 0 and storage in gradients]
    frees = tuple((storage, -count) for storage, count in added)
    at = max((changes.index(change) for change in added), default=-1) + 1
    yield from (*changes[:at], *frees, *changes[at:])


def _without(steps: Iterable[NodeStep], storages: Mapping[int, str]) -> tuple[NodeStep, ...]:
    if not storages:
        return tuple(steps)
    return tuple(NodeStep(step.node, tuple(c for c in step.changes if c[0] not in storages)) for step in steps)


def _changes(steps: Iterable[NodeStep]) -> Iterator[Change]:
    return (change for step in steps for change in step.changes)


def alive_after(steps: Iterable[NodeStep]) -> dict[int, int]:
    """Return the storages that steps leave, with their bytes."""
    alive: dict[int, int] = {}
    for storage, count in _changes(steps):
        if count > 0:
            alive[storage] = count
        else:
            alive.pop(storage, None)
    return alive


def _measured(steps: tuple[NodeStep, ...], kinds: dict[int, MemoryKind]) -> Piece:
    live: dict[MemoryKind, int] = {}
    total = peak = 0
    at_peak: dict[MemoryKind, int] = {}
    for storage, count in _changes(steps):
        kind = kinds.get(storage, "transient")
        live[kind] = live.get(kind, 0) + count
        total += count
        if total > peak:
            peak, at_peak = total, dict(live)
    return Piece(steps, kinds, peak, at_peak, {kind: count for kind, count in live.items() if count})
