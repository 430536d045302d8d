"""What ranks tell each other of a call that all of them run, and which of its values go from rank to rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autosplit.distributed.feed import takers_of
from autosplit.distributed.ranks.carrying import ServedStep
from autosplit.distributed.ranks.remote import Leaf, Noted
from autosplit.generation.caches import Layout, Layouts
from autosplit.runtime.ops import OUT
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
