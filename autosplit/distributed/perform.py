"""The list of a step on one rank, performed: actions, messages, sums over replicas, gathers of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch

from autosplit.distributed.replicas import Reductions
from autosplit.distributed.units import Units
from autosplit.distributed.world import World
from autosplit.parallel import Parallel
from autosplit.runtime.lanes.threads import backwards, forwards
from autosplit.runtime.step.cells import parameters
from autosplit.runtime.step.step import Step
from autosplit.runtime.step.sums import Held, Sums
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.entry import Entry, Receive, Reduce, Reshard, Send, Unshard
from autosplit.schedule.order import (
    Receives,
    arrivals,
    check_state,
    of_device,
    step_order,
)


@dataclass(kw_only=True)
class PerformedStep(Step):
    """One call on one rank, by the list of its entries.

    Attributes:
        world: the ranks.
        ranks: by stage, the ranks of its replicas.
        parallel: what the ranks share out, which says what lists have beside actions and messages.
        gathered: by the identity of this replica's shards of parameters, what these are gathered to; None: it has none.
        units: what gathers parameters unit by unit; None: they are gathered for the whole step, if they are sharded.
        most: the most microbatches that a replica has, where there are several.
        alone: whether the other replicas do not make this call.
    """

    world: World
    ranks: Sequence[Sequence[int]]
    parallel: Parallel
    gathered: Mapping[int, torch.Tensor] | None = None
    units: Units | None = None
    most: int = 0
    alone: bool = False

    @property
    def stages(self) -> Sequence[int]:
        """The stages of this rank, ascending."""
        return [stage for stage, members in enumerate(self.ranks) if self.world.rank in members]

    def entries(self, schedule: Schedule, cells: Any) -> Sequence[Entry]:
        """Return this rank's actions of a schedule, its receives and its sends, where the global order has them.

        Where actions gather parameters, the order is that of the replica with the most microbatches, and those that
        this one does not have gather and scatter only.
        """
        transport, rank = cells.transport, self.world.rank
        receives: Receives = "ahead" if transport.known.complete else "described"
        schedule = self._of_all(schedule) if self.by_units else schedule

        def compiled() -> Any:
            order = step_order(schedule, self.lowered.sources, cells.loss_sources, receives=receives)
            order = tuple(issued for issued in order if self._takes_part(issued.entry))
            entries = of_device(order, rank)
            sent = {entry.route for entry in entries if isinstance(entry, Send)}
            return self.completed(cells.listed(entries), schedule, rank), arrivals(order, rank), sent

        key = "order", schedule.name, schedule.microbatches, len(self.sizes), cells.loss_sources, receives, self.alone
        entries, transport.arrivals, transport.ordered = self.once(key, compiled)
        return entries

    def do(self, cells: Any, entry: Entry, before: Entry | None = None, after: Entry | None = None) -> None:
        """Perform an entry: sums right behind the backward that they follow begin beside that.

        ``cells`` None: this replica has no rows.
        """
        if isinstance(entry, Action):
            if entry.microbatch < len(self.sizes):
                self.world.watch.doing(entry)
                with self._reducing(cells, entry.stage) if self._is_beside(entry, after) else nullcontext():
                    super().do(cells, entry)
            return
        if isinstance(entry, Receive):
            cells.transport.expect(entry.route)
        elif isinstance(entry, Send):
            cells.transport.release(entry.route)
        elif isinstance(entry, (Unshard, Reshard)):
            self._gather(entry, after, cells)
        elif not isinstance(entry, Reduce):
            super().do(cells, entry)
        elif self.overlaps and not self._is_beside(before, entry):
            with self._reducing(cells, entry.stage):
                pass
        if self.log is not None:
            self.log.note(entry)

    @property
    def passing(self) -> Collection[int]:
        """The parameters that units are gathered to."""
        return set(map(id, self.gathered.values())) if self.units is not None and self.gathered is not None else ()

    @property
    def by_units(self) -> bool:
        """Whether actions gather their parameters, which all replicas do together."""
        return self.units is not None and not self.units.whole

    def all_gathered(self) -> AbstractContextManager[None]:
        """Have all parameters of this rank inside; all replicas call it."""
        return nullcontext() if self.units is None else self.units.all_gathered()

    def _of_all(self, schedule: Schedule) -> Schedule:
        """Return a schedule, or the forwards or backwards of one, for the most microbatches that a replica has."""
        if self.most in (0, schedule.microbatches):
            return schedule
        reduced = {"forward": forwards, "backward": backwards}.get(schedule.name, replace)
        return self.once(("of all", schedule.name, self.most), lambda: reduced(self.schedule_of(self.most)))

    def _takes_part(self, entry: Entry) -> bool:
        """Tell whether this replica has an entry: messages of its microbatches only, and all actions."""
        return not isinstance(entry, (Receive, Send)) or entry.route.microbatch < len(self.sizes)

    def completed(self, entries: Sequence[Entry], schedule: Schedule, lane: int) -> Sequence[Entry]:
        """Return this rank's list with its sums, and with what it gathers."""
        if not self.alone and (self.units is None or self.by_units):
            entries = self.parallel.entries(entries, schedule.marks[lane] if schedule.marks else ())
        check_state(entries)
        return entries

    def _gather(self, entry: Unshard | Reshard, following: Entry | None, cells: Any) -> None:
        """Begin the turns of the action that follows, or end those of the one before."""
        units = self.units
        if units is None or units.whole:
            return
        with self.lanes[entry.stage].active():
            if isinstance(entry, Reshard):
                units.end()
                return
            assert isinstance(following, Action)
            stage, kind, microbatch = following
            split = self.once(("apart", stage), lambda: self._is_split(stage))
            turns = self.once(("turns", stage, kind), lambda: units.turns(self.lowered, stage, kind, split=split))
            runs = cells is not None and microbatch < len(self.sizes)
            units.begin(turns, cells.replicas(stage)[0] if runs else None)

    def _is_split(self, stage: int) -> bool:
        """Tell whether weight gradients of a stage come apart, so that autograd is asked for all gradients."""
        return any(action.kind == "I" and action.stage == stage for action in self.schedule_of(max(self.most, 1)))

    @property
    def overlaps(self) -> bool:
        """Whether sums over the replicas begin behind a stage's last backward; those of shards wait for the step."""
        return self.world.replicas > 1 and self.gathered is None

    @cached_property
    def reductions(self) -> Reductions:
        """The sums over the replicas that are under way."""
        return Reductions(self.world, self.reduce_dtype)

    @contextmanager
    def entered(self) -> Iterator[list[Any]]:
        """Order the lanes' work as in one process; sums that lanes have begun are the caller's to use, too."""
        with super().entered() as handed:
            yield handed
            handed += self.reductions.tensors()

    def _reducing(self, cells: Any, stage: int) -> AbstractContextManager[None]:
        """Begin to add up the gradients of a stage's parameters, but for those that may get more behind the actions."""
        if cells is None:
            sums = Sums(Held(stage, 0), self.codes[Held(stage, 0)], self.lanes[stage], (), None)
            sums.use(parameters(self)[sums.held])
        else:
            sums = cells.replicas(stage)[0]
        shared = {id(tensor) for tensor in self._shared_parameters()}
        return self.reductions.beside([p for p in sums.parameters if id(p) not in shared], sums)

    def _shared_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that are tied between stages, or read by what runs once per step."""
        root = self.lowered.traced.root
        names = self.once("shared parameters", lambda: self.lowered.layout.read_once())
        return [attrgetter(name)(root) for name in names]

    def perform_with_others(self, schedule: Schedule) -> None:
        """Perform what this rank's list has beside actions and messages, as the other replicas do."""
        rank = self.world.rank
        for entry, after in pairwise((*self.completed(schedule.lanes[rank], schedule, rank), None)):
            if entry is not None and not isinstance(entry, Action):
                self.do(None, entry, after=after)

    def _is_beside(self, action: Entry | None, entry: Entry | None) -> bool:
        """Tell whether an entry is a sum that begins while the action before it makes the gradients."""
        behind = isinstance(entry, Reduce) and isinstance(action, Action) and action[:2] == (entry.stage, "B")
        return behind and self.overlaps
