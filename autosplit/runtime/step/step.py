"""One call of the pipe: what to run, on what, in which schedule, and what comes before and behind the cells."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.lanes.threads import forwards
from autosplit.runtime.norms import Moments
from autosplit.runtime.ops import Bundle, CallState, enter, leave, on_lane, transfer
from autosplit.runtime.step.attributes import StandInAttributes
from autosplit.runtime.step.sums import Held
from autosplit.runtime.step_log import StepLog
from autosplit.runtime.transport import SharedMemory, Transport
from autosplit.schedule.action import Action, Schedule

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and the gradients that they get."""


@dataclass
class Step:
    """One call of the pipe: what to run, on what, in which schedule.

    ``lowered`` are the pieces (`Lowered`); ``setup`` and ``ending`` the parts of the
    program before the first cell and behind the last; ``locate`` adds a note to an exception of an action.
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
    """Gives the plan's schedule for a number of microbatches."""
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

    @property
    def schedule(self) -> Schedule:
        """The plan's schedule for this call's microbatches."""
        count = len(self.sizes)
        return self.once(("schedule", count), lambda: self.planned(count))

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

    def perform(self, schedule: Schedule, cells: Any) -> None:
        """Perform a schedule's actions in the calling thread; cells send and receive what their list says."""
        for action in self.once(("order", schedule.name, schedule.microbatches), lambda: schedule.issue_order):
            cells.act(action)

    def transport(self, *, detached: bool) -> Transport:
        """Return what brings values from stage to stage."""
        asynchronous = any(self.lane_of(held).asynchronous for held in self.held)
        return SharedMemory(self.lane, self.log, detached=detached, asynchronous=asynchronous)

    def check_free(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raise InputError for leaves under a loss, beside the outputs, that would not get their whole gradient."""

    def losing(self) -> AbstractContextManager[Any]:
        """Return what a loss is called in."""
        return contextlib.nullcontext()

    def outcome(self, make: Callable[[], Any]) -> Any:
        """Return what is made where the last stage runs."""
        return make()

    def forwards(self) -> Sequence[Action]:
        """Return the forwards of the schedule in the order in which one thread issues them."""
        return forwards(self.schedule).issue_order

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

    def start(self) -> Start:
        """Run what comes before the first cell, in the caller's thread and graph."""
        with self.located():
            start = Start(*self.setup(*self.program_inputs()))
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
            return self.ending(*self.program_inputs(), start.kept, bundles)

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Add a note to an exception that says where in the program it was raised."""
        try:
            yield
        except Exception as error:
            self.locate(error)
            raise


@dataclass(frozen=True)
class Start:
    """What the cells begin with.

    Attributes:
        inputs: per stage that takes any, its microbatches of the batch.
        shared: per stage that takes any, its shared values and tied parameters.
        kept: what the ending wants of the values that the setup made.
        transport: what has brought some of them, and brings values from stage to stage; None: nothing yet.
    """

    inputs: dict[int, Sequence[Bundle]]
    shared: dict[int, Bundle]
    kept: Bundle
    transport: Transport | None = None

    def hand_over(self, by_stage: Sequence[Pairs], backward: Callable[[Pairs], None]) -> None:
        """Give tensors their gradients, listed by the stage that made these; ``backward`` does so for a list."""
        pairs = [pair for stage in by_stage for pair in stage]
        for stage in by_stage:
            stage.clear()
        backward(pairs)
