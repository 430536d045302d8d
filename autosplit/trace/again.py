"""Calls of repeated blocks at a later size that need not be written down again: they are where they were at the first.

    first recording    blocks.0:  5 6 7 8     blocks.1:  9 10 11 12     equal but for names
    later one          blocks.0:  5 6 7 8     blocks.1:  like 5, like 6, like 7, like 8

Where a block is given the same values as at the first size, and its equal made the same calls at the same places, what
is merged of the equal's calls is merged of the block's, under the names that the first recording has for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autosplit.trace.recording import Call, Recording, Ref

if TYPE_CHECKING:
    from autosplit.trace.record import Recorder
    from autosplit.trace.repeats import Segment


class Again(Call):
    """A call of the first recording at a later size: all but its names is as in the call with index ``like``."""

    like: int

    @classmethod
    def of(cls, call: Call, like: int) -> Again:
        """Return a call as the first recording has it."""
        made = cls.__new__(cls)
        made.__dict__.update(call.__dict__)
        made.like = like
        return made


class Mixed(Exception):
    """Some later recordings have a call once more, others made it anew."""


def aligned(first: Mapping[str, Segment], like: Segment, path: str, start: int, given: list[Any]) -> Segment | None:
    """Return the first recording's run of a block where its equal's run and what it is given are as they were there."""
    own, other = first.get(path), first.get(like.path)
    if own is None or other is None or own.start != start or own.given != given:
        return None
    same = (other.start, other.end, other.given) == (like.start, like.end, like.given)
    return own if same and other.returned == like.returned and other.after == like.after else None


def write_again(
    recorder: Recorder, first: Recording, own: Segment, like: Segment, leaves: list[Any], similar: Any
) -> Any:
    """Write down that a block did what it did at the first size; return tensors like its equal's."""
    shift = like.start - own.start
    calls = first.calls[own.start : own.end]
    recorder.calls += [Again.of(call, index + shift) for index, call in enumerate(calls, own.start)]
    outputs: list[Any] = []
    for now, value, tensor in zip(own.returned, like.returned, like.tensors, strict=True):
        if tensor is None:
            outputs.append(value)
        elif isinstance(now, Ref) and now.index >= own.start:
            with recorder.muted():
                outputs.append(similar(tensor))
            recorder.adopt(outputs[-1], now.index)
        else:
            outputs.append(next(leaf for leaf, other in zip(leaves, own.given, strict=True) if other == now))
    for leaf, ref in zip(leaves, own.after, strict=True):
        if isinstance(ref, Ref) and ref.index >= own.start:
            recorder.stand_for(leaf, ref.index)
    return like.rebuild(outputs)
