"""How calls that ranks run together travel: the messages between their stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autosplit.distributed.messages import Descriptions, Messages
from autosplit.distributed.ranks.prepared import PreparedRankStep
from autosplit.runtime.lower.program import ending_slots, slots_of
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.ops import ENDING
from autosplit.runtime.transport import Message
from autosplit.schedule.entry import Route


class Carried(Messages):
    """The messages of a call. Tied weights go to another rank once, as they stay as they are between the calls."""

    def __init__(self, *args: Any, lowered: Lowered, lent: dict[tuple[str, int], Any], **ways: Any) -> None:
        super().__init__(*args, known=Descriptions(), **ways)
        self._lowered, self._lent = lowered, lent

    def _tied(self, route: Route) -> list[tuple[str, int] | None]:
        """Return the names of the tied weights of a message, with the rank that takes them; None for other values."""
        layout, to = self._lowered.layout, self._ends(route)[1][0]
        slots = ending_slots(self._lowered) if route.microbatch == ENDING else slots_of(layout, route.target)
        names = [slot.value for slot in slots if layout.home.get(slot.value) == route.source]
        return [(name, to) if name in layout.given else None for name in names]

    def send(self, route: Route, message: Message) -> None:
        """Give away what a stage made, and weights that the other rank does not have."""
        if route.microbatch < 0:
            tied = self._tied(route)
            message = [None if key in self._lent else t for key, t in zip(tied, message, strict=True)]
            self._lent.update((key, None) for key in tied if key is not None)
        super().send(route, message)

    def recv(self, route: Route) -> Message:
        """Return what was sent, and weights that were sent before."""
        message = super().recv(route)
        if route.microbatch < 0:
            pairs = list(zip(self._tied(route), message, strict=True))
            self._lent.update((key, tensor) for key, tensor in pairs if key and tensor is not None)
            message = [self._lent[key] if key else tensor for key, tensor in pairs]
        return message


@dataclass(kw_only=True)
class ServedStep(PreparedRankStep):
    """A call that ranks run together; ``lent`` are the tied weights that went from rank to rank."""

    lent: dict[tuple[str, int], Any]
    carrier = Carried

    def _described(self) -> dict[str, Any]:
        return {"lowered": self.lowered, "lent": self.lent}
