"""What ranks tell each other of a call that all of them run, and how its values go from rank to rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autosplit.distributed.feed import takers_of
from autosplit.distributed.messages import Descriptions, Messages
from autosplit.distributed.ranks.prepared import PreparedRankStep
from autosplit.distributed.ranks.remote import Leaf, Noted
from autosplit.generation.caches import Layout, Layouts
from autosplit.runtime.lower.program import ending_slots, slots_of
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.ops import ENDING, OUT
from autosplit.runtime.transport import Message
from autosplit.schedule.entry import Route
from autosplit.trace.graph import INFO


@dataclass(frozen=True)
class Call:
    """What the last rank tells the others: to run an entry; without one, that it makes no more calls.

    ``arrived``: messages of calls before this number have arrived. ``noted`` and ``dropped`` come first (`Notes.take`),
    then ``layouts`` that are new, and inputs ``sent`` for more calls than this one.
    """

    number: int
    arrived: int
    noted: Sequence[Noted]
    dropped: Sequence[Hashable]
    entry: str = ""
    sent: Sequence[Leaf] = ()
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Sequence[Leaf]] = field(default_factory=dict)
    leaves: Sequence[Any] = ()
    structure: Any = None


class ServedLayouts(Layouts):
    """The layouts of caches as the last rank has numbered them; those that this rank records have numbers below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Layout] = {}

    def __getitem__(self, number: int) -> Layout:
        return self.known[number]

    def _number(self, layout: Layout) -> int:
        return -1 - super()._number(layout)


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


@dataclass(frozen=True)
class Seam:
    """Which outputs of a recording stay where they were made.

    Attributes:
        kept: by position, the stage that makes a tensor of a cache, and where that is in what it gives.
        travels: by stage, the positions of what it gives that the last rank takes.
        takers: by position of an input, the ranks that read it.
        changed: the inputs that the model changes in place.
    """

    kept: Mapping[int, tuple[int, int]]
    travels: Mapping[int, Sequence[int]]
    takers: Mapping[int, set[int]]
    changed: Sequence[int]

    @staticmethod
    def of(step: ServedStep) -> Seam:
        """Return that of a call's recording."""
        lowered, layout = step.lowered, step.lowered.layout
        gives = [stage.sent.get(OUT, ()) for stage in layout.stages]
        places = {slot.value: (stage, at) for stage, slots in enumerate(gives) for at, slot in enumerate(slots)}
        *_, after = lowered.traced.unflatten(list(range(len(lowered.outputs))))
        state = {position for _, tensors in after.values() for position in tensors}
        kept, wanted = {}, {slot.value for slot in lowered.epilogue_inputs}
        for position, value in enumerate(lowered.outputs):
            if isinstance(value, fx.Node) and value.name in layout.merged and INFO in value.meta:
                stage, _ = place = places[value.name]
                if position in state and step.ranks[stage][0] != step.last:
                    kept[position] = place
                else:
                    wanted.add(value.name)
        travels = {s: [at for at, slot in enumerate(slots) if slot.value in wanted] for s, slots in enumerate(gives)}
        changed = [index for index, info in enumerate(lowered._inputs) if info.mutated]
        return Seam(kept, travels, takers_of(step, step.ranks, returned=False), changed)
