"""One call of the pipe on one rank: its own stages, with messages to and from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autosplit.distributed.groups import default_timeout
from autosplit.distributed.messages import Descriptions, Messages, Sent, arrived
from autosplit.distributed.perform import PerformedStep
from autosplit.distributed.replicas import Share, added_in_order, adding_gradients, join_statistics
from autosplit.distributed.words import digest
from autosplit.distributed.world import attempt
from autosplit.errors import DeviceError, InputError, as_known, known_to_all
from autosplit.runtime.lanes.threads import forwards
from autosplit.runtime.lower.split import named_state
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.tape import Tape
from autosplit.schedule.entry import Route
from autosplit.trace.graph import NodeClass


@dataclass(kw_only=True)
class RankStep(PerformedStep):
    """One call on one rank.

    Attributes:
        group: the group of those of this rank's stage; None where it has one.
        sent: what is on its way to others.
        whole: whether what comes behind the last cell runs: the merges, and what mixes rows.
        messages: what travels in steps of this kind.
        outcomes: what ranks said of the loss of such a step.
        loss: what tells them apart: how a loss adds up, or what a backward begins with.
        timeout_s: the ranks hang when none has moved for so many seconds.
        trained: gives the parameters and buffers of this rank that require a gradient.
        shares: the rows of each replica, where there are several.
        scaled: whether a ``GradScaler`` scales the loss.
        again: whether the loss reads parameters itself, which get more when the sums of their stage's have begun.
    """

    group: Any = None
    sent: Sent = field(default_factory=dict)
    whole: bool = False
    messages: dict[Any, Descriptions] = field(default_factory=dict)
    outcomes: dict[str, Any] = field(default_factory=dict)
    loss: Any = None
    timeout_s: float
    trained: Callable[[], Sequence[torch.Tensor]] = tuple
    shares: Sequence[int] = ()
    scaled: bool = False
    again: bool = False
    carrier: ClassVar[Callable[..., Messages]] = Messages
    """Makes what brings messages."""

    @cached_property
    def takers(self) -> Sequence[torch.Tensor]:
        """What gets gradients: parameters and buffers of this rank, or this replica's shards of them."""
        return self.trained()

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The takers as cells compute with them."""
        return [(self.gathered or {}).get(id(taker), taker) for taker in self.takers]

    @property
    def last(self) -> int:
        """The rank of the last stage, of its replicas the first."""
        return self.ranks[-1][0]

    @property
    def in_parts(self) -> bool:
        """Whether the loss is made of parts: of microbatches, or of replicas."""
        return super().in_parts or self.world.replicas > 1

    def processes(self, stage: int) -> int:
        """Return how many ranks have a stage."""
        return len(self.ranks[stage])

    def ends(self, route: Route) -> tuple[int, Sequence[int]]:
        """Return the rank that sends what goes a way, and those that receive it.

        Replicas take microbatches in turn. What goes once per step is the same on all of them. What comes behind the
        last cell, and the losses of the last stage's replicas, are for the first of these.
        """
        source, targets = self.ranks[route.source], self.ranks[route.target]
        if route.microbatch < 0:
            return source[0], targets
        there, back = source[route.microbatch % len(source)], targets[route.microbatch % len(targets)]
        if route.loss and (self.whole or route.source == route.target):
            return (self.last, (back,)) if route.backward else (there, (self.last,))
        return there, (back,)

    @property
    def known(self) -> Descriptions:
        """What travels between stages in such a step."""
        return self.messages.setdefault((self.whole, self.loss, torch.is_grad_enabled()), Descriptions())

    def transport(self, *, detached: bool) -> Messages:
        """Return what brings values from stage to stage, also of other ranks; a step has one."""
        args = self.world, self.ends, self.lanes, self.log
        return self.carrier(*args, sent=self.sent, detached=detached, **self._described())

    def _described(self) -> dict[str, Any]:
        """Return by what messages are described."""
        return {"known": self.known}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a step or call: an error that this rank alone has ends all ranks, and so does a hang."""
        with self.world.watch.step(self.timeout_s):
            try:
                yield
            except BaseException as error:
                if not (known_to_all(error) or isinstance(error, DeviceError)):
                    self.world.watch.failed(error)
                raise

    def check_free(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raise InputError where the loss has parameters of its own: every rank has others."""
        if leaves and self.units is not None:
            raise InputError(
                "the loss reads a parameter itself, and fsdp_reshard='always' has those of the model only while their "
                "layers run; make it part of the model, or use fsdp_reshard='never'"
            )
        self.again |= bool(leaves)
        held = {id(leaf) for leaf in self.leaves} if leaves and len(self.ranks[-1]) == 1 else set()
        for leaf in leaves:
            if id(leaf) not in held:
                raise InputError(
                    f"the loss has a parameter of its own, of shape {list(leaf.shape)}, and every rank would have "
                    "another one; make it part of the model"
                )

    def outcome(self, make: Callable[[], Any]) -> Any:
        """Return on every rank what the ranks of the last stages make together: a number, added over the replicas.

        An error of one is raised on every rank. Either way random numbers are then where the plain model leaves them.
        """
        self._draw_rest()
        world, makes = self.world, self.world.rank == self.last and self.rows > 0
        value, error = attempt(make) if makes else (None, None)
        read = world.pipelines == 1 and not world.accelerated  # else it is added up and sent where it lies
        facts = None if value is None else (value.dtype, self.scaled, self.again, value.item() if read else 0.0)
        dtype, self.scaled, self.again, number = self._facts_of_loss(facts, error)
        if value is None:
            value = torch.tensor(number, dtype=dtype, device=world.device)
        if world.replicas > 1:
            value = value.detach().clone()
            if world.rank == self.last:
                world.combine("losses of other replicas", value, world.across)
        if not read:
            world.broadcast(value.detach().view(1), self.last)
        return value

    def _facts_of_loss(self, facts: Any, error: BaseException | None) -> Any:
        """Return what ranks say that have a loss; they vote for what they said in the last step of this kind."""
        world, known = self.world, self.outcomes.get("loss")
        if world.pipelines == 1:  # one word for all takes less than one of each
            return world.told(self.last, facts, error)
        stands = error is None and known is not None and facts in (None, known)
        if not (stands and world.vote("has a loss", -2, digest(repr(known)))):
            words = world.agree("has a loss", {}, error, facts)
            (dtype, *_), *_ = said = [words[ranks[self.last]] for ranks in world.layout if words[ranks[self.last]]]
            known = dtype, any(scaled for _, scaled, *_ in said), any(again for _, _, again, _ in said), 0.0
            self.outcomes["loss"] = known
        return known

    def share_overflow(self) -> None:
        """Make all gradients infinite where one of any rank is, so that each rank's ``GradScaler`` skips the step."""
        gradients = [_local(taker.grad) for taker in self.takers if taker.grad is not None]
        infinite = torch.zeros((), device=self.world.device)
        if gradients:
            values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            infinite += ~torch.stack([g.isfinite().all() for g in values]).all()
        for group in (self.world.payload, self.world.tensor, self.world.across):
            self.world.combine("whether gradients of other ranks are infinite", infinite, group, dist.ReduceOp.MAX)
        factor = torch.where(infinite > 0, torch.inf, 1.0)
        for gradient in gradients:
            gradient.mul_(factor)

    def among(self, shares: Sequence[Share]) -> RankStep:
        """Return the step as one of a batch of which every rank has said what its replica has."""
        firsts, replica = [shares[members[0]] for members in self.world.layout], self.world.replica
        rows = tuple(share.rows for share in firsts)
        if not any(rows):
            raise as_known(InputError("no replica has any rows; leave out a step without a batch"))
        state = replace(self.state, before=sum(share.microbatches for share in firsts[:replica]))
        if (tape := state.tape) is not None:
            among = sum(rows[:replica]), sum(rows)
            state = replace(state, tape=Tape(tape.nodes, self.sizes, self.lengths, here=tape.here, among=among))
        return replace(self, state=state, shares=rows, most=max(share.microbatches for share in firsts))

    def check_empty(self, *, changes_python: bool) -> None:
        """Raise InputError where a replica has no rows and a call changes state once, whatever its rows."""
        nodes = self.lowered.traced.compute_nodes()
        written = [name for _, info in nodes if info.node_class is NodeClass.SHARED for name in info.writes]
        if 0 in self.shares and (written or changes_python):
            raise as_known(
                InputError(
                    f"replica {self.shares.index(0)} has no rows, and every call changes "
                    f"{written[0] if written else 'Python state of the model'}, which it would not do there; give "
                    "every replica rows"
                )
            )

    def summed(
        self, stage: int, leaves: Sequence[torch.Tensor], sums: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the sums over the ranks of this rank's stage."""
        if self.group is None or stage not in self.stages:
            return sums
        with self.world.waiting("gradients of its stage's other replicas", *set(self.ranks[stage]) - {self.world.rank}):
            return added_in_order(self.group, leaves, sums, self.reduce_dtype)

    def join_losses(self, cells: Any) -> None:
        """Tell the last stage's first replica what the others know of losses."""
        for microbatch in range(len(self.sizes)) if len(self.ranks[-1]) > 1 else ():
            route = Route(cells.last, cells.last, microbatch, loss=True)
            source, _ = self.ends(route)
            if source == self.world.rank != self.last:
                cells.transport.send(route, cells.told(microbatch))
            elif source != self.world.rank == self.last:
                cells.hear(microbatch, cells.transport.recv(route))

    def adding_gradients(self) -> AbstractContextManager[None]:
        """Add the gradients that come to this rank's parameters inside to those of the other replicas."""
        if self.world.replicas == 1 and self.gathered is None:
            return nullcontext()
        scattered = self.units.take_sums if self.units is not None else dict
        return adding_gradients(self.reductions, self.leaves, self.takers, scattered, again=self.again)

    def has_rows(self, replica: int) -> bool:
        """Tell whether a replica has rows of the batch."""
        return not self.shares or self.shares[replica] > 0

    def join_statistics(self) -> None:
        """Give this rank's norms what those of all replicas saw, of the pipeline or of the stage."""
        in_turn = max(map(len, self.ranks)) > 1
        if (self.world.replicas > 1 or in_turn) and self.lowered.counts and not self.alone:
            alike = self.ranks[self.stages[0]] if in_turn else [self.world.rank]
            held = [members[rank] for members in self.world.layout for rank in alike]
            named = named_state(self.lowered.traced.root)
            join_statistics(self.world, self.state.statistics, named, held, in_turn=in_turn)

    def stand_by(self) -> torch.Tensor:
        """Take part in a step of which this replica has no rows; return its loss."""
        with torch.inference_mode(False), torch.enable_grad():
            self.perform_with_others(self.schedule_of(self.most))
            value: torch.Tensor = self.outcome(lambda: None)
            with self.adding_gradients():
                pass
        self._end_standing_by()
        return value

    def stand_by_forward(self) -> None:
        """Take part in a call for which this replica has no rows."""
        self.perform_with_others(forwards(self.schedule_of(self.most)))
        self._end_standing_by()

    def _end_standing_by(self) -> None:
        self.join_statistics()
        update_statistics(self.state, self.lanes)
        self.finish()

    def _draw_rest(self) -> None:
        if self.state.tape is not None:
            self.state.tape.finish()

    def finish(self) -> None:
        """Wait until all that was sent has arrived, and leave the random numbers where the plain model leaves them."""
        self._draw_rest()
        with self.world.waiting("its messages to arrive", *self.world.others()):
            arrived(self.sent, list(self.sent))
        self.known.complete = True


def seconds_of(timeout: Any, device: torch.device) -> float:
    """Return a timeout in seconds; None: torch's default for process groups of this kind of device."""
    if timeout is None:
        timeout = default_timeout(device.type == "cuda")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InputError(f"timeout={timeout!r}; give a number of seconds above 0, or a datetime.timedelta")
    return float(seconds)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
