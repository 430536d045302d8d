"""One call of the pipe: what to run, on what, in which schedule, and what comes before and behind the cells."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from autosplit.runtime.lanes.ambient import ThreadState
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.lanes.threads import LaneThreads, backwards, forwards, turns
from autosplit.runtime.norms import Moments
from autosplit.runtime.ops import ENDING, Bundle, CallState, enter, leave, on_lane, transfer
from autosplit.runtime.step.attributes import StandInAttributes
from autosplit.runtime.step.sums import Held
from autosplit.runtime.step_log import StepLog
from autosplit.runtime.transport import SharedMemory, Transport
from autosplit.schedule.action import Gradients, Schedule
from autosplit.schedule.entry import Entry, Receive, Route, Send
from autosplit.schedule.order import in_clock_order, lane_lists

_NOTHING = contextlib.nullcontext()
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and the gradients that they get."""


@dataclass
class Step:
    """One call of the pipe: what to run, on what, in which schedule.

    ``lowered`` are the pieces (`Lowered`); ``setup`` and ``ending`` make the parts of the program before the first cell
    of some stages, and behind the last cell; ``locate`` adds a note to an exception of an action.
    """

    lowered: Any
    setup: Callable[..., Any]
    ending: Callable[..., Any]
    locate: Callable[..., None]
    tensors: list[torch.Tensor]
    rows: int
    lengths: dict[str, int]
    """The lengths for which the recording has symbols, by their names."""
    sizes: tuple[int, ...]
    lanes: tuple[Lane, ...]
    """One lane per stage, that of its first replica, and last the caller's device."""
    state: CallState
    planned: Callable[[int], Schedule]
    """Gives the plan's schedule for a number of microbatches, with all gradients."""
    orders: dict[Any, Any]
    """Schedules made ready to run, kept from call to call."""
    log: StepLog | None = field(default=None, kw_only=True)
    """Notes what runs, where somebody asked for that."""
    reduce_dtype: torch.dtype | None = field(default=None, kw_only=True)
    """What gradients of narrower parameters are added up in; None: in the parameter's dtype."""
    replicas: Sequence[Any] = field(default=(), kw_only=True)
    """What runs the second replica of each stage that has one, the third, and so on."""
    apart: dict[Held, CallState] = field(default_factory=dict, kw_only=True)
    """The call's state for further replicas: with statistics of their own."""
    threads: LaneThreads | None = field(default=None, kw_only=True)
    """What runs the lanes at the same time; None: the calling thread performs everything."""

    @property
    def schedule(self) -> Schedule:
        """The plan's schedule for this call's microbatches."""
        return self.schedule_of(len(self.sizes))

    def schedule_of(self, microbatches: int) -> Schedule:
        """Return the plan's schedule for so many microbatches, with what makes gradients in such a call."""
        return self.once(("schedule", microbatches), lambda: self.planned(microbatches).needed(self.gradients))

    @property
    def gradients(self) -> Sequence[Gradients]:
        """Of what each stage makes gradients in such a call."""
        return self.once("gradients", lambda: self.lowered.gradients(self.call(0)[0].tensors))

    @property
    def forwards(self) -> Schedule:
        """What a call of the pipe performs first."""
        return self.once(("forwards", len(self.sizes)), lambda: forwards(self.schedule))

    @property
    def backwards(self) -> Schedule:
        """What the backward of a call performs."""
        return self.once(("backwards", len(self.sizes)), lambda: backwards(self.schedule).needed(self.gradients))

    @property
    def held(self) -> list[Held]:
        """The stages and their replicas."""
        stages = [Held(stage, 0) for stage in range(len(self.lowered.stages))]
        stages += [Held(stage, number) for number, replica in enumerate(self.replicas, 1) for stage in replica.lanes]
        return sorted(stages)

    def holder(self, stage: int, microbatch: int) -> Held:
        """Return which of a stage's replicas runs a microbatch."""
        first = self.schedule.stage_lane[stage] if self.replicas else 0
        return Held(stage, self.schedule.lane_of(stage, microbatch) - first if self.replicas else 0)

    def lane_of(self, held: Held) -> Lane:
        """Return the lane of a replica of a stage."""
        lane: Lane = self.replicas[held.replica - 1].lanes[held.stage] if held.replica else self.lanes[held.stage]
        return lane

    def lane(self, stage: int, microbatch: int) -> Lane:
        """Return the lane that runs a microbatch of a stage."""
        return self.lane_of(self.holder(stage, microbatch))

    def brought(self, held: Held, tensor: torch.Tensor) -> torch.Tensor:
        """Return a replica's tensor on the device of its stage's first replica, in the caller's order."""
        source, target = self.lane_of(held), self.lanes[held.stage]
        if source.device == target.device:
            return tensor
        return transfer((tensor,), source.here(), target.here())[0]

    def program(self, held: Held) -> Any:
        """Return the pieces that a replica of a stage runs."""
        return self.replicas[held.replica - 1].lowered if held.replica else self.lowered

    def summed(
        self, stage: int, leaves: Sequence[torch.Tensor], sums: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the sums of a stage's leaves over all processes, by those over the replicas of this one."""
        return sums

    def join_losses(self, cells: Any) -> None:
        """Tell cells what they have to know of losses that other processes computed."""

    @property
    def stages(self) -> Sequence[int]:
        """The stages that run in this process: all of them."""
        return range(len(self.lowered.stages))

    @property
    def in_parts(self) -> bool:
        """Whether the loss is made of parts."""
        return len(self.sizes) > 1

    @property
    def passing(self) -> Collection[int]:
        """By identity, the parameters that are there for some actions only, and their gradients too."""
        return ()

    def state_of(self, held: Held) -> CallState:
        """Return the call's state for a replica of a stage."""
        return self.apart.setdefault(held, replace(self.state, statistics={})) if held.replica else self.state

    def call(self, microbatch: int) -> tuple[Step, int]:
        """Return the call of the model that has a microbatch, and its number there."""
        return self, microbatch

    def join_statistics(self) -> None:
        """Give norms what those of further replicas saw too, and those of other processes."""
        self.add_statistics(self.state, self.apart)
        self.apart.clear()

    def add_statistics(self, state: CallState, replicas: Mapping[Held, CallState]) -> None:
        """Give norms what those of further replicas saw."""
        for held, other in replicas.items():
            for name, use in other.statistics.items():
                merged = state.statistics.setdefault(name, use)
                for microbatch, seen in use.parts.items():
                    moved = (self.brought(held, moment) for moment in seen[1:])
                    merged.parts[microbatch] = Moments(seen.values, *moved)

    def perform(
        self,
        schedule: Schedule,
        cells: Any,
        state: ThreadState | None = None,
        within: AbstractContextManager[Any] = _NOTHING,
    ) -> None:
        """Perform the list of a schedule: on the lanes' threads, in a thread ``state``, or in the calling thread.

        ``within`` is entered for as long as that takes.
        """
        if self.threads is not None:
            key = "turns", schedule.name, len(self.sizes), cells.loss_sources
            lanes = self.once(key, lambda: turns(self._lists(schedule, cells)))
            self.threads.run(lanes, partial(self.do, cells), state or ThreadState.current(), within)
            return
        with within:
            entries = self.entries(schedule, cells)
            for entry, before, after in zip(entries, (None, *entries), (*entries[1:], None), strict=False):
                self.do(cells, entry, before, after)

    def entries(self, schedule: Schedule, cells: Any) -> Sequence[Entry]:
        """Return what the calling thread performs of a schedule; actions send and receive themselves."""

        def made() -> Sequence[Entry]:
            entries = in_clock_order(schedule, self._lists(schedule, cells))
            return [entry for entry in entries if not isinstance(entry, (Send, Receive))]

        return self.once(("entries", schedule.name, len(self.sizes)), made)

    def _lists(self, schedule: Schedule, cells: Any) -> Sequence[Sequence[Entry]]:
        """Return what each lane performs of a schedule."""
        return [*map(cells.listed, lane_lists(schedule, self.lowered.sources, cells.loss_sources))]

    def do(self, cells: Any, entry: Entry, before: Entry | None = None, after: Entry | None = None) -> None:
        """Perform an entry that stands between two others."""
        cells.act(entry)

    def transport(self, *, detached: bool) -> Transport:
        """Return what brings values from stage to stage."""
        asynchronous = any(self.lane_of(held).asynchronous for held in self.held)
        return SharedMemory(self.lane, self.log, detached=detached, asynchronous=asynchronous)

    def adding_gradients(self) -> AbstractContextManager[None]:
        """Add the gradients that come to parameters inside to those of other processes."""
        return contextlib.nullcontext()

    def check_free(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raise InputError for leaves under a loss, beside the outputs, that would not get their whole gradient."""

    def losing(self) -> AbstractContextManager[Any]:
        """Return what a loss is called in."""
        return contextlib.nullcontext()

    def outcome(self, make: Callable[[], Any]) -> Any:
        """Return what is made where the last stage runs."""
        return make()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` made at the first call with this key."""
        if key not in self.orders:
            self.orders[key] = make()
        return self.orders[key]

    def program_inputs(self) -> tuple[Any, ...]:
        """Return what the program takes."""
        return (*self.tensors, self.rows, *self.lengths.values(), self.sizes, self.lanes, self.state)

    def attributes(self, held: Held) -> StandInAttributes | None:
        """Return what a cell runs in, so that attributes set on stand-ins of modules get to the modules."""

        def make() -> StandInAttributes:
            region, here = self.program(held).stages[held.stage], sum(other.stage == held.stage for other in self.held)
            return StandInAttributes(
                region, held.stage, replicas=here, everywhere=max(here, self.processes(held.stage))
            )

        attributes = self.once(("attributes", held), make)
        return attributes if attributes.called else None

    @cached_property
    def codes(self) -> dict[Held, Any]:
        """What runs the stages of this process in this step (:class:`autosplit.runtime.lower.stage_code.StageCode`)."""
        return {held: self.program(held).code(held.stage) for held in self.held if held.stage in self.stages}

    def codes_by(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return what runs the stages in a program, by the ``names`` of the modules that it stands for."""
        codes = {}
        for (stage, replica), code in self.codes.items():
            if code.is_entered and not replica:
                code.fill(code.read())
                codes[names[f"stage{stage}"]] = on_lane(code.function, self.lanes[stage])
        return codes

    def processes(self, stage: int) -> int:
        """Return how many processes have replicas of a stage."""
        return 1

    def start(self, *, ending: bool) -> Start:
        """Run what comes before the first cell, in the caller's thread; ``ending``: :meth:`end` follows.

        Where all stages are here, that is in the caller's graph.
        """
        stages, slots = self.stages, self.lowered.layout.stages
        graphs = stages if len(stages) < len(slots) else ()
        with self.located():
            transport = self.transport(detached=torch.is_grad_enabled()) if graphs else None
            run = self.once(("setup", ending), lambda: self.setup(stages, ending=ending))
            start = replace(Start(*run(*self.program_inputs(), transport)), transport=transport, graphs=graphs)
        homes = self.lowered.layout.home
        for stage, bundle in start.shared.items() if graphs else ():
            taken = zip(slots[stage].shared, bundle, strict=True)
            start.home.update({id(value): homes[slot.value] for slot, value in taken if slot.value in homes})
        for replica in self.replicas:
            replica.refresh(self.lanes)
        return start

    @contextlib.contextmanager
    def entered(self) -> Iterator[list[Any]]:
        """Order the lanes' work behind the caller's, and at the end the caller's behind theirs.

        Yields a list for the tensors that the caller is going to use.
        """
        lanes, caller = list(dict.fromkeys(map(self.lane_of, self.held))), self.lanes[-1]
        handed: list[Any] = []
        enter(caller, lanes)
        try:
            yield handed
        finally:
            leave(caller, lanes, handed)

    def end(self, start: Start, bundles: Mapping[int, Sequence[Bundle]]) -> Sequence[Any]:
        """Run what comes behind the last cell, on what the stages gave per microbatch; return the flat outputs."""
        with self.located():
            return self.once("ending", self.ending)(*self.program_inputs(), start.kept, bundles)

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Add a note to an exception that says where in the program it was raised."""
        try:
            yield
        except Exception as error:
            self.locate(error)
            raise


Way = tuple[int, int, int]
"""The home of values that go once per step, the stage that takes them, and whether that is before or behind cells."""


@dataclass(frozen=True)
class Start:
    """What the cells of a process begin with, and the way back of the gradients.

    Replicas of a stage do all this alike: what is lent comes from the first of a stage and goes to all of another.

    Attributes:
        inputs: per stage that takes any, its microbatches of the batch.
        shared: per stage that takes any, its shared values and tied parameters.
        kept: what the ending wants of the values that the setup made.
        lent: by stage, what went to stages of other processes, and which way.
        borrowed: by the stage of another process that made it, what came from there.
        cut: by the stage whose shared nodes take them, or ``ENDING``, values of other stages of this process: the leaf
            that stands for one there, the value, and its home.
        transport: what has brought some of them, and brings values from stage to stage; None: nothing yet.
        graphs: the stages, ascending, where the shared nodes of each have a graph of their own; empty: there is one.
        home: by the identity of a value that cells take, the stage that made it.
    """

    inputs: dict[int, Sequence[Bundle]]
    shared: dict[int, Bundle]
    kept: Bundle
    lent: dict[int, list[tuple[Way, Bundle]]]
    borrowed: dict[int, list[tuple[Way, Bundle]]]
    cut: dict[int, list[tuple[torch.Tensor, torch.Tensor, int]]]
    transport: Any = None
    graphs: Sequence[int] = ()
    home: dict[int, int] = field(default_factory=dict)

    def hand_over(self, by_stage: Sequence[Pairs], backward: Callable[[Pairs], None]) -> None:
        """Give this process's tensors their gradients, listed by stage, and other processes those of what they lent.

        ``backward`` gives a list of tensors theirs. Stages go in descending order: what was lent comes back, then the
        stage's own backward runs.
        """
        waiting, back = self._by_home(by_stage)
        self._pass_on(ENDING, waiting)
        for stage in sorted({*(self.graphs or (0,)), *self.borrowed}, reverse=True):
            for way, values in self.borrowed.get(stage, ()):
                if any(value.requires_grad for value in values):
                    self.transport.send(Route(*way).back, [back.get(id(value), value.grad) for value in values])
            pairs = waiting.pop(stage, [])
            for way, values in self.lent.get(stage, ()):
                if any(value.requires_grad for value in values):
                    came = self.transport.recv(Route(*way).back)
                    pairs += [(v, g) for v, g in zip(values, came, strict=True) if g is not None]
            if pairs:
                backward(pairs)
            self._pass_on(stage, waiting)

    def _by_home(self, by_stage: Sequence[Pairs]) -> tuple[dict[int, Pairs], dict[int, torch.Tensor]]:
        """Take the pairs; return them by home, and by identity the gradients of what is borrowed. No name keeps one."""
        waiting: dict[int, Pairs] = defaultdict(list)
        back: dict[int, torch.Tensor] = {}
        for stage, pairs in enumerate(by_stage):
            for tensor, gradient in pairs:
                home = self.home.get(id(tensor), stage) if self.graphs else 0
                if home in self.borrowed:
                    back[id(tensor)] = gradient
                else:
                    waiting[home].append((tensor, gradient))
            pairs.clear()
        return waiting, back

    def _pass_on(self, stage: int, waiting: dict[int, Pairs]) -> None:
        for leaf, value, home in self.cut.get(stage, ()):
            if leaf is not value and leaf.grad is not None:
                waiting[home].append((value, leaf.grad))
