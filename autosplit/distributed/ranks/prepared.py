"""One call of a pipe on one rank, ready to run, and what is known of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autosplit.distributed.messages import Descriptions
from autosplit.distributed.ranks.loss import ReadsHere
from autosplit.distributed.ranks.wrapped import WrappedPart
from autosplit.distributed.replicas import Share
from autosplit.distributed.step import RankStep
from autosplit.recorded import PreparedStep, Recorded


def is_checked(number: int) -> bool:
    """Tell whether a call of a kind, by its number, is looked at closely: the first three, and every hundredth."""
    return number < 3 or number % 100 == 0


@dataclass(eq=False)
class Agreed:
    """What the ranks have agreed on for calls of one kind.

    Attributes:
        kind: the key of the kind on this rank.
        recorded: its recording.
        texts: descriptions for its number of rows and for any number; empty: not computed yet.
        calls: how many calls there were.
        number: of the meeting since which all ranks of the pipeline know the kind; 0: not yet.
        meeting: the number of the last meeting; 0: there was none.
        shares: what the ranks said in it.
        outcomes: what they said of what comes out of such calls.
        messages: the messages of such a call.
        scaled: whether a ``GradScaler`` scales its loss.
    """

    kind: tuple[Any, ...]
    recorded: Recorded
    texts: tuple[str, ...] = ()
    calls: int = 0
    number: int = 0
    meeting: int = 0
    shares: list[Share] = field(default_factory=list)
    outcomes: dict[str, Any] = field(default_factory=dict)
    messages: dict[Any, Descriptions] = field(default_factory=dict)
    scaled: bool = False


@dataclass(kw_only=True)
class PreparedRankStep(RankStep, PreparedStep):
    """One call on one rank, and the recording that it follows.

    Attributes:
        agreed: what is known of such calls.
        elsewhere: gives the names of parameters that other ranks have, all or a part, by their identity; None: the loss
            is known not to read them.
        part: what shards of parameters are gathered in; None: there are none.
    """

    agreed: Agreed
    elsewhere: Callable[[], Mapping[int, str]] | None = None
    part: WrappedPart | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a step or call, on whole parameters."""
        if self.part is not None:
            self.takers = self.trained()  # the model has whole ones inside
        with super().running(), self._whole() as gathered:
            self.gathered = gathered if self.parallel.zero else None
            yield

    def _whole(self) -> AbstractContextManager[Mapping[int, Any] | None]:
        if self.part is None:
            return nullcontext()
        if self.units is None:
            return self.part.whole()
        return self.part.by_units(self.units, self.units.held_for(self.lowered))

    def losing(self) -> AbstractContextManager[Any]:
        """Return what a loss is called in: it reads no parameter of another rank."""
        if self.elsewhere is None:
            return nullcontext()
        return ReadsHere(self.elsewhere(), partial(setattr, self, "scaled", True))
