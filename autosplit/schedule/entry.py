"""The entries of a device's list: what it computes, sends, receives, sums up, gathers and updates in a step.

| entry | text | stream | |
|---|---|---|---|
| Action | ``2F0``, B, I, W | compute | a stage's work for a microbatch |
| Receive | ``2RECV_F0`` | copy | posts the receive of a message; the action that takes it waits for it |
| Send | ``2SEND_F0`` | copy | sends what the action before it has made |
| Reduce | ``2REDUCE_GRAD`` | reduce | begins to add a stage's gradients to those of its replicas |
| Unshard | ``2UNSHARD`` | reduce | begins to gather a stage's parameters, of which every replica has a shard |
| Reshard | ``2RESHARD`` | compute | lets go of what was gathered |
| Update | ``2UPDATE`` | compute | the optimizer steps a stage's parameters; waits for its sums |

The text is that of ``torch.distributed.pipelining``, whose messages go from a stage to the next one, forward, or to the
one before, gradients. A message to another stage says which, ``0SEND_F1(3)``; so does what the loss takes,
``1SEND_F0(3 loss)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from autosplit.schedule.action import Action


class Route(NamedTuple):
    """From which stage to which something goes, of which microbatch.

    ``loss``: among what the stage gives the caller, for the loss behind the last stage. ``backward``: gradients, from
    the stage that took the values to the one that made them.
    """

    source: int
    target: int
    microbatch: int
    loss: bool = False
    backward: bool = False

    @property
    def back(self) -> Route:
        """The route of the gradients of what takes this route."""
        return Route(self.target, self.source, self.microbatch, self.loss, backward=True)


@dataclass(frozen=True)
class _Message:
    route: Route

    def _text(self, what: str, stage: int, other: int) -> str:
        route = self.route
        is_next = route.target - route.source == (-1 if route.backward else 1)
        whose = [] if is_next and not route.loss else [str(other)]
        whose += ["loss"] if route.loss else []
        suffix = f"({' '.join(whose)})" if whose else ""
        return f"{stage}{what}_{'B' if route.backward else 'F'}{route.microbatch}{suffix}"


class Send(_Message):
    """A device sends a message to the device of the route's target."""

    @property
    def stage(self) -> int:
        """The stage that made the message."""
        return self.route.source

    def __str__(self) -> str:
        return self._text("SEND", self.route.source, self.route.target)


class Receive(_Message):
    """A device posts the receive of a message from the device of the route's source."""

    @property
    def stage(self) -> int:
        """The stage that takes the message."""
        return self.route.target

    def __str__(self) -> str:
        return self._text("RECV", self.route.target, self.route.source)


@dataclass(frozen=True)
class _OfStage:
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{_NAMES[type(self)]}"


class Reduce(_OfStage):
    """A device begins to add its gradients of a stage to those of the other replicas of the pipeline, in buckets.

    Right behind the stage's last B, buckets begin while that makes the others. Elsewhere all are complete.
    """


class Unshard(_OfStage):
    """A device begins to gather the parameters of a stage, of which every replica of the pipeline has a shard."""


class Reshard(_OfStage):
    """A device lets go of the gathered parameters of a stage."""


class Update(_OfStage):
    """The optimizer steps the parameters of a stage, when its sums are there."""


Entry = Action | Send | Receive | Reduce | Unshard | Reshard | Update
_OF_STAGE: dict[str, type[Reduce | Unshard | Reshard | Update]] = {
    "REDUCE_GRAD": Reduce,
    "UNSHARD": Unshard,
    "RESHARD": Reshard,
    "UPDATE": Update,
}
_NAMES: dict[type[_OfStage], str] = {kind: name for name, kind in _OF_STAGE.items()}
_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)(?:\((\d+)( loss)?\))?", re.ASCII)
_STAGE = re.compile(rf"(\d+)({'|'.join(_OF_STAGE)})", re.ASCII)


class Issued(NamedTuple):
    """One entry of a global order, and the device whose it is."""

    device: int
    entry: Entry


def parse_entry(text: str) -> Entry:
    """Return the entry that ``text`` names; ``parse_entry(str(entry)) == entry``. Raises ScheduleError for none."""
    text = text.strip()
    if (match := _MESSAGE.fullmatch(text)) is not None:
        stage, microbatch, backward = int(match[1]), int(match[4]), match[3] == "B"
        step = -1 if backward else 1
        if match[2] == "SEND":
            target = stage + step if match[5] is None else int(match[5])
            return Send(Route(stage, target, microbatch, match[6] is not None, backward))
        source = stage - step if match[5] is None else int(match[5])
        return Receive(Route(source, stage, microbatch, match[6] is not None, backward))
    if (match := _STAGE.fullmatch(text)) is not None:
        return _OF_STAGE[match[2]](int(match[1]))
    return Action.parse(text)
