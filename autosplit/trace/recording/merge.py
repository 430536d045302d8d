"""Recordings at two or three batch sizes become one whose numbers are expressions of the batch size.

Another recording holds where it is the merged one at its number of rows. At one row expansions are left out of both
sides first, as transformers leaves them out there:

    3 rows   arange ─► unsqueeze [1, 16] ─► expand [3, 16] ─► diff
    1 row    arange ─► unsqueeze [1, 16] ───────────────────► diff         expand [1, 16] of [1, 16] changes nothing
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_aggregate

from autosplit.errors import TraceError
from autosplit.trace.graph import ROWS, Length, Size, TensorInfo, affine, evaluate
from autosplit.trace.inputs.signature import GradAutocastState
from autosplit.trace.recording.random_watch import Draw
from autosplit.trace.recording.recording import (
    Attribute,
    Call,
    Differs,
    Recording,
    Ref,
    mapped_together,
)

BATCH_SIZES = (3, 4)
"""The numbers of rows of the first two recordings, of which every number is a line; others must lie on it."""


@dataclass(frozen=True)
class MergedCall:
    """A call with formulas of sizes in its arguments, and the tensors that it makes."""

    call: Call
    args: Any
    kwargs: Any
    tensors: tuple[TensorInfo, ...]
    draws: tuple[Draw, ...] | None = ()
    """What it draws, in order; None where that depends on more than sizes."""


@dataclass(frozen=True)
class MergedRecording:
    """What the recordings have in common; ``lengths`` are the symbols of its formulas, beside the rows."""

    calls: tuple[MergedCall, ...]
    output: list[Any]
    recording: Recording
    lengths: tuple[Length, ...] = ()


def merge(recordings: Sequence[Recording], sizes: Sequence[int]) -> MergedRecording:
    """Merge recordings at two or more numbers of rows.

    Raises TraceError where they differ by more than affine numbers.
    """
    first = recordings[0]
    for other, rows in zip(recordings[1:], sizes[1:], strict=True):
        _same_calls(first, other, sizes[0], rows)
    merged: list[MergedCall] = []
    for calls in zip(*(r.calls for r in recordings), strict=True):
        try:
            args, kwargs = _values(sizes, [(c.args, c.kwargs) for c in calls])
            tensors = tuple(
                TensorInfo(tuple(Size(*_line(sizes, sides)) for sides in zip(*shapes, strict=True)), dtype, layout)
                for shapes, dtype, layout in zip(
                    zip(*(c.shapes for c in calls), strict=True), calls[0].dtypes, calls[0].layouts, strict=True
                )
            )
        except (Differs, ValueError) as error:
            raise TraceError(
                f"{calls[0].name} is not affine in the batch: at {', '.join(map(str, sizes))} rows it has "
                f"{error}; a graph holds for all batch sizes only when sizes are a*rows + b"
            ) from None
        merged.append(MergedCall(calls[0], args, kwargs, tensors, _draws(sizes, calls)))
    try:
        output = _values(sizes, [r.output for r in recordings])
    except Differs as error:
        raise TraceError(f"the model's output cannot be recorded: it holds {error}") from None
    _same_constants(recordings)
    return MergedRecording(tuple(merged), output, first)


def changed_constant(recording: Recording, other: Recording) -> str | None:
    """Return the name of a constant that differs in another recording, or None.

    Tensors and classes are told by identity, grad mode and autocast by what they are, functions by their code. Other
    objects may be new at every call: their class tells.
    """
    values = other.constants
    return next((name for name, value in recording.constants.items() if not _is_one(value, values.get(name))), None)


def _is_one(value: Any, other: Any) -> bool:
    if value is other or isinstance(value, (torch.Tensor, type)):
        return value is other
    if isinstance(value, (GradAutocastState, types.BuiltinFunctionType)):
        return bool(value == other)
    code = getattr(value, "__code__", None)
    return type(value) is type(other) and code == getattr(other, "__code__", None)


def _same_calls(first: Recording, other: Recording, least: int, rows: int) -> None:
    what = f"forward does other things at {rows} rows than at {least}"
    why = "Python code there depends on the number of rows, or batch_dims= must say where the batch is"
    for a, b in zip(first.calls, other.calls, strict=False):
        if (a.name, a.kind) != (b.name, b.kind) or not (a.target is b.target or a.target == b.target):
            raise TraceError(f"{what}: {a.name} became {b.name} (module {a.module or 'root'!r}); {why}")
    if len(first.calls) != len(other.calls):
        last = first.calls[min(len(first.calls), len(other.calls)) - 1].name
        counts = f"{len(first.calls)} operations became {len(other.calls)}"
        raise TraceError(f"{what}: {counts} (last common one: {last}); {why}")


def _same_constants(recordings: Sequence[Recording]) -> None:
    first = recordings[0]
    for other in recordings[1:]:
        if (name := changed_constant(first, other)) is None:
            continue
        value = first.constants[name]
        if isinstance(value, torch.Tensor):
            raise TraceError(
                f"forward captures another constant tensor ({name}) at every call; register it as a buffer"
            )
        what = "grad mode or autocast" if isinstance(value, GradAutocastState) else f"object ({name})"
        raise TraceError(f"forward runs with another {what} at other batch sizes; a graph has one for all")


def _draws(sizes: Sequence[int], calls: Sequence[Call]) -> tuple[Draw, ...] | None:
    try:
        draws: tuple[Draw, ...] | None = _values(sizes, [call.draws for call in calls])
        return draws
    except (Differs, ValueError):
        return None


def _values(sizes: Sequence[int], values: Sequence[Any]) -> Any:
    return mapped_together(partial(_value, sizes), *values)


def _value(sizes: Sequence[int], *values: Any) -> Any:
    first = values[0]
    if any(type(v) is not type(first) for v in values):
        raise Differs(", ".join(map(repr, values)))
    if isinstance(first, (Ref, Attribute)):
        if any(v != first for v in values):
            raise Differs("different operands")
        return first
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return affine(*_line(sizes, values))
    if not all(_is_same(v, first) for v in values):
        if isinstance(first, (bool, str)):
            raise Differs(", ".join(map(repr, values)))
        raise Differs(f"a new {type(first).__name__} at every call, which no graph can rebuild")
    return first


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (not isinstance(value, np.ndarray) and bool(value == other))


def _line(sizes: Sequence[int], values: Sequence[float]) -> tuple[Any, Any]:
    """Return the slope and the constant of the line in the number of rows on which numbers lie."""
    first = values[0]
    if all(v == first or (v != v and first != first) for v in values):
        return 0, first
    per_row = (values[1] - values[0]) / (sizes[1] - sizes[0])
    constant = values[0] - per_row * sizes[0]
    on_line = (abs(per_row * s + constant - v) <= 1e-9 * max(1.0, abs(v)) for s, v in zip(sizes, values, strict=True))
    if not all(on_line) or (isinstance(first, int) and per_row % 1):
        raise Differs(f"the numbers {', '.join(map(str, values))}")
    return (int(per_row), int(constant)) if isinstance(first, int) else (per_row, constant)


def equal(expected: Any, value: Any, sizes: Mapping[str, int] = MappingProxyType({})) -> bool:
    """Tell whether nested arguments are those of a merged recording at given sizes."""

    def same(value: Any, other: Any) -> None:
        value = evaluate(value, sizes)
        if not (_is_same(value, other) or (value != value and other != other)):
            raise Differs

    try:
        mapped_together(same, expected, value)
    except Differs:
        return False
    return True


# -- one row -----------------------------------------------------------------------------------------------------------
_FACTS = attrgetter("kind", "module", "leaf", "shapes", "dtypes", "random", "reads", "writes")
_EXPANSIONS = frozenset((torch.Tensor.expand, torch.Tensor.expand_as, torch.Tensor.broadcast_to, torch.broadcast_to))


def holds_at(
    merged: MergedRecording, recording: Recording, *, rows: int, lengths: Mapping[str, int] = MappingProxyType({})
) -> bool:
    """Tell whether a recording at ``rows`` rows and given lengths is the merged one evaluated there.

    At one row expansions that change nothing may be left out, or be done besides.
    """
    if changed_constant(merged.recording, recording) is not None:
        return False
    expected: Sequence[Call] = [
        replace(
            m.call,
            args=m.args,
            kwargs=m.kwargs,
            draws=m.draws,
            shapes=[t.shape_at(rows, lengths) for t in m.tensors],
        )
        for m in merged.calls
    ]
    calls, output, returned = recording.calls, merged.output, recording.output
    if rows == 1:
        expected, output = _without_expansions(expected, output)
        calls, returned = _without_expansions(calls, returned)
    sizes = {**lengths, ROWS: rows}
    return (
        len(expected) == len(calls)
        and all(_same(a, b, sizes) for a, b in zip(expected, calls, strict=True))
        and equal(output, returned, sizes)
    )


def _without_expansions(calls: Sequence[Call], output: Any) -> tuple[list[Call], Any]:
    """Return calls and output without the expansions that give their operand's shape."""
    left: list[Call] = []
    stands: list[int] = []
    """For each call its index among the remaining calls, or the index of the operand that it returns."""

    def renumbered(value: Any) -> Any:
        return Ref(stands[value.index]) if isinstance(value, Ref) else value

    for call in calls:
        operand = call.args[0] if call.kind == "function" and call.target in _EXPANSIONS else None
        if isinstance(operand, Ref) and calls[operand.index].shapes == call.shapes:
            stands.append(stands[operand.index])
            continue
        stands.append(len(left))
        args, kwargs = map_aggregate((call.args, call.kwargs), renumbered)
        left.append(replace(call, args=args, kwargs=kwargs))
    return left, map_aggregate(output, renumbered)


def _same(a: Call, b: Call, sizes: Mapping[str, int]) -> bool:
    """Tell whether two calls are one, the numbers of the first taken at sizes."""
    if (_FACTS(a), _label(a)) != (_FACTS(b), _label(b)) or not (a.target is b.target or a.target == b.target):
        return False
    if a.draws is not None and not equal(a.draws, b.draws or (), sizes):
        return False
    return equal((a.args, a.kwargs), (b.args, b.kwargs), sizes)


def _label(call: Call) -> str:
    """Return a call's name without the number that it has among its like in one module."""
    if call.kind == "project":  # named after the call that it is a part of, which is its operand
        return ""
    return call.name.rpartition("_")[0] if call.kind in ("function", "read") else call.name
