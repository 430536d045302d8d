"""In what the ranks of a pipe agree: before each call what it is, and at times the values of which they hold copies."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.distributed.facts import BATCH, call_text, check_copies, checksum, copies_of, program_text
from autosplit.distributed.world import World, as_known, attempt
from autosplit.kept import Recent
from autosplit.ranks.loss import RankLoss
from autosplit.ranks.prepared import PreparedRankStep
from autosplit.trace.inputs.lengths import without_rows
from autosplit.trace.inputs.objects import tensors_in
from autosplit.trace.inputs.signature import Key

_EVERY = 100
"""Of so many steps one compares copies of parameters and buffers, for which it waits for the device."""


class Agreement:
    """What the ranks of one pipe compare; ``feed`` says which of them have the batch."""

    def __init__(self, world: World, model: nn.Module, feed: str) -> None:
        self._world, self._model, self._feed = world, model, feed
        self._texts: Recent[Key, tuple[str, str]] = Recent()
        self._steps = 0

    def facts(
        self, step: PreparedRankStep, args: Any, kwargs: Any, loss: RankLoss | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return in what calls of all ranks have to agree, and in what those of a replica."""
        call, kind = self._texts_of(step.key, args, kwargs)
        facts: dict[str, Any] = {
            "the kind of call": kind,
            "what each stage runs": step.once("program", lambda: program_text(step.lowered)),
        }
        own: dict[str, Any] = {"the call": call}
        if self._feed == "all":
            own[BATCH] = checksum(step.tensors)
            own["the target"] = checksum(tensors_in(loss and loss.target))
            if loss is not None:
                everywhere, of_rows = loss.facts(step)
                facts |= everywhere
                own |= of_rows
        if step.lowered.random:
            facts["torch's random state"] = zlib.crc32(torch.get_rng_state().numpy().data)
        if step.state.tape is not None and self._world.replicas > 1:
            lengths = "the lengths of their batches, for which random numbers are drawn (pad alike, or rng='counter')"
            facts[lengths] = str(without_rows(step.key.shapes, step.recorded.kind.batch_dims))
        return facts, own

    def _texts_of(self, key: Key, args: Any, kwargs: Any) -> tuple[str, str]:
        """Return what a call is as text, on these rows and on any, made once for calls of one signature."""
        if key not in self._texts:
            text = call_text(self._model, args, kwargs)
            several = self._world.replicas > 1
            self._texts[key] = text, call_text(self._model, args, kwargs, values=False) if several else ""
        return self._texts[key]

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
