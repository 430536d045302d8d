"""In what the ranks of a pipe agree: before each call what it is, and at times the values of which they hold copies.

    the first calls of a kind, then every 100th    a meeting compares all facts, the batch's values among them
    others                                         each rank votes for the meeting since which all have known the kind

Where votes differ, or a rank has none, they meet as well: what one refuses all refuse.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.distributed.facts import BATCH, call_text, check_copies, checksum, copies_of, program_text
from autosplit.distributed.ranks.loss import RankLoss
from autosplit.distributed.ranks.prepared import Agreed, PreparedRankStep, is_checked
from autosplit.distributed.replicas import Share
from autosplit.distributed.world import World, attempt
from autosplit.errors import InputError, as_known
from autosplit.trace.inputs.lengths import without_rows
from autosplit.trace.inputs.objects import tensors_in

_EVERY = 100
"""Of so many steps one compares copies of parameters and buffers, for which it waits for the device."""
_KINDS = 32
"""How many kinds of calls are known."""


class Agreement:
    """What the ranks of one pipe compare; ``feed`` says which of them have the batch."""

    def __init__(self, world: World, model: nn.Module, feed: str, check_inputs: int | None) -> None:
        """Of ``check_inputs`` calls of a kind one compares the batch's values, 0: none; None: as is said above."""
        if not (check_inputs is None or (isinstance(check_inputs, int) and check_inputs >= 0)):
            raise InputError(f"check_inputs={check_inputs!r}; give a number of calls, True, False or None")
        self._world, self._model, self._feed, self._check_inputs = world, model, feed, check_inputs
        self._votes = feed == "all"
        self._kinds: list[Agreed] = []
        self._steps = self._meetings = 0

    def known(self, doing: str, step: PreparedRankStep, loss: RankLoss | None) -> Agreed:
        """Return what is known of calls of a kind."""
        kind = doing, step.key.shapes, loss and loss.kind, step.key
        for agreed in reversed(self._kinds):
            if agreed.recorded is step.recorded and agreed.kind == kind:
                return agreed
        self._kinds = [*self._kinds[1 - _KINDS :], Agreed(kind, step.recorded)]
        return self._kinds[-1]

    def stands(self, doing: str, step: PreparedRankStep, word: Any) -> bool:
        """Tell whether all ranks vote for what they agreed on in an earlier call of the kind.

        One that has another ``word`` than then, compares values, or calls the model's own Python meets the others. So
        does one whose replicas have made other kinds of calls together than then.
        """
        agreed, drawn = step.agreed, _random_state() if step.lowered.random else 0
        if not self._votes or step.python is not None or self.compares(agreed.calls):
            return False
        known = agreed.meeting > 0 and agreed.shares[self._world.number].word == word
        agreed.calls += (stands := known and self._world.vote(doing, agreed.meeting, drawn))
        return stands

    def keep(self, agreed: Agreed, shares: list[Share]) -> None:
        """Keep what ranks have said of a call in a meeting; where not all have known its kind, they do from now on."""
        self._meetings += 1
        agreed.calls += 1
        agreed.meeting, agreed.shares = self._meetings, shares
        if {shares[number].kind for number in self._world.members} != {agreed.number or -1}:
            agreed.number = self._meetings
            agreed.messages.clear()

    def compares(self, number: int) -> bool:
        """Tell whether a call of a kind, by its number, compares the batch's values."""
        if self._check_inputs is None:
            return is_checked(number)
        return self._check_inputs > 0 and number % self._check_inputs == 0

    def facts(
        self, step: PreparedRankStep, args: Any, kwargs: Any, loss: RankLoss | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the facts that must be equal on all ranks, and those that must be equal within a replica."""
        call, kind = self._texts_of(step.agreed, args, kwargs)
        facts: dict[str, Any] = {
            "the kind of call": kind,
            "what each stage runs": step.once("program", lambda: program_text(step.lowered)),
        }
        per_replica: dict[str, Any] = {"the call": call}
        if self._feed == "all":
            if self._check_inputs != 0 and (self._world.pipelines == 1 or self.compares(step.agreed.calls)):
                per_replica |= {BATCH: checksum(step.tensors), "the target": checksum(tensors_in(loss and loss.target))}
            if loss is not None:
                per_replica["the target's shapes"] = str(loss.kind[0])
                everywhere, of_rows = loss.facts(step)
                facts |= everywhere
                per_replica |= of_rows
        if step.lowered.random:
            facts["torch's random state"] = _random_state()
        if step.state.tape is not None and self._world.replicas > 1:
            lengths = "the lengths of their batches, for which random numbers are drawn (pad alike, or rng='counter')"
            facts[lengths] = str(without_rows(step.key.shapes, step.recorded.kind.batch_dims))
        return facts, per_replica

    def _texts_of(self, agreed: Agreed, args: Any, kwargs: Any) -> tuple[str, ...]:
        """Return what a call is as text, on these rows and on any, made once for calls of one kind."""
        if not agreed.texts:
            several = self._world.replicas > 1
            any_rows = call_text(self._model, args, kwargs, values=False) if several else ""
            agreed.texts = call_text(self._model, args, kwargs), any_rows
        return agreed.texts

    def steps(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Count a step; compare the copies of a state in the first one and in every hundredth."""
        if self._steps % _EVERY == 0:
            self.check_copies(state)
        self._steps += 1

    def check_copies(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Raise InputError on every rank where values differ of which several hold copies; a state has a rank's names.

        Replicas have copies, ranks that share the other tensors of a stage, and stages that use one buffer.
        """
        every = self._world.gather("compares copies of parameters and buffers", copies_of(state))
        _, error = attempt(lambda: check_copies(every))
        if error is not None:
            raise as_known(error)


def _random_state() -> int:
    return zlib.crc32(torch.get_rng_state().numpy().data)
