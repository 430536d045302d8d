"""One call of a pipe on one rank, ready to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autosplit.distributed.step import RankStep
from autosplit.ranks.loss import ReadsHere
from autosplit.ranks.parallelize import Part
from autosplit.recorded import PreparedStep


@dataclass(kw_only=True)
class PreparedRankStep(RankStep, PreparedStep):
    """One call on one rank, and the recording that it follows.

    ``elsewhere`` are the names of parameters that other ranks have, all or a part, by their identity. ``part``: what
    shards of parameters are gathered in; None: there are none.
    """

    elsewhere: Mapping[int, str] = field(default_factory=dict)
    part: Part | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a step or call, on whole parameters."""
        self.takers = self.leaves
        gathered = nullcontext(dict[int, torch.Tensor]()) if self.part is None else self.part.whole()
        with super().running(), gathered as whole:
            self.leaves = [whole.get(id(taker), taker) for taker in self.takers]
            yield

    def losing(self) -> AbstractContextManager[Any]:
        """Return what a loss is called in: it reads no parameter of another rank."""
        return ReadsHere(self.elsewhere, partial(setattr, self, "scaled", True))
