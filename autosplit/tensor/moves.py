"""From one state of a value to another: the collectives that takes, forward and backward, and their bytes on the wire.

Bytes are what one rank sends with rings: an all-reduce of n bytes over p ranks 2 n (p - 1) / p, an all-gather or a
reduce-scatter half of that (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). An all-to-all sends each of
the other ranks its part of the own part: n (p - 1) / p².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autosplit.tensor.axes import Shard
from autosplit.tensor.ways import COPIED, PARTIAL, REPLICATED, State, Whole

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Phase = Literal["forward", "backward"]
_PARTS = "parts"


@dataclass(frozen=True)
class Collective:
    """One collective: ``value_bytes`` of the whole value, ``wire_bytes`` that a rank sends."""

    kind: Kind
    phase: Phase
    value_bytes: int
    wire_bytes: float


def collectives(
    source: State | Shard, target: State | Shard, *, value_bytes: int, ranks: int, gradient: bool, again: bool = False
) -> list[Collective]:
    """Return the collectives between two states; ``gradient``: the value has one.

    ``again``: what is sent in the forward is so in the backward too.
    """
    if source is target:
        return []
    forward, backward = _MOVES[_kind(source), _kind(target)]
    result: list[Collective] = []
    if forward:
        phases: tuple[Phase, ...] = ("forward", "backward") if again else ("forward",)
        result += [_collective(forward, phase, value_bytes, ranks) for phase in phases]
    if backward and gradient:
        result.append(_collective(backward, "backward", value_bytes, ranks))
    return result


def _kind(state: State | Shard) -> Whole | str:
    return state if isinstance(state, Whole) else _PARTS


def _collective(kind: Kind, phase: Phase, value_bytes: int, ranks: int) -> Collective:
    once = value_bytes * (ranks - 1) / ranks
    return Collective(kind, phase, value_bytes, {"all_reduce": 2 * once, "all_to_all": once / ranks}.get(kind, once))


_MOVES: dict[tuple[Whole | str, Whole | str], tuple[Kind | None, Kind | None]] = {
    (REPLICATED, COPIED): (None, "all_reduce"),
    (REPLICATED, PARTIAL): (None, None),
    (REPLICATED, _PARTS): (None, "all_gather"),
    (COPIED, REPLICATED): (None, None),
    (COPIED, PARTIAL): (None, None),
    (COPIED, _PARTS): (None, None),
    (PARTIAL, REPLICATED): ("all_reduce", None),
    (PARTIAL, COPIED): ("all_reduce", "all_reduce"),
    (PARTIAL, _PARTS): ("reduce_scatter", "all_gather"),
    (_PARTS, REPLICATED): ("all_gather", None),
    (_PARTS, COPIED): ("all_gather", "reduce_scatter"),
    (_PARTS, PARTIAL): (None, None),
    (_PARTS, _PARTS): ("all_to_all", "all_to_all"),
}
"""What a move takes forward and backward. The backward of a move is that of the gradient's states the other way round:
a value that is whole, of whose gradient ranks hold summands, has its gradient reduced where it was the whole."""
