"""A recording at one row that differs from the merged one by expansions that change nothing there, and by nothing else.

transformers leaves out an ``expand`` to the number of rows where there is one row:

    3 rows   arange ─► unsqueeze [1, 16] ─► expand [3, 16] ─► diff
    1 row    arange ─► unsqueeze [1, 16] ───────────────────► diff         expand [1, 16] of [1, 16] changes nothing

So both sides are compared without the expansions that give their operand's shape. The graph keeps those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from autosplit.trace.formula import ROWS
from autosplit.trace.merge import MergedRecording, equal, matches, same_constants
from autosplit.trace.recording import Call, Recording, Ref, mapped

_EXPANSIONS = frozenset((torch.Tensor.expand, torch.Tensor.expand_as, torch.Tensor.broadcast_to, torch.broadcast_to))


def holds_at(
    merged: MergedRecording, recording: Recording, *, rows: int, lengths: Mapping[str, int] = MappingProxyType({})
) -> bool:
    """Tell whether a recording at ``rows`` rows does what the merged one does there.

    At one row expansions that change nothing may be left out, or be done besides.
    """
    if matches(merged, recording, rows=rows, lengths=lengths):
        return True
    if rows != 1 or not same_constants(merged.recording, recording):
        return False
    graph = [
        replace(m.call, args=m.args, kwargs=m.kwargs, draws=m.draws, shapes=[t.shape_at(1, lengths) for t in m.tensors])
        for m in merged.calls
    ]
    expected, output = _without_expansions(graph, merged.output)
    made, returned = _without_expansions(recording.calls, recording.output)
    sizes = {**lengths, ROWS: 1}
    return (
        len(expected) == len(made)
        and all(_same(a, b, sizes) for a, b in zip(expected, made, strict=True))
        and equal(output, returned, sizes)
    )


def _without_expansions(calls: Sequence[Call], output: Any) -> tuple[list[Call], Any]:
    """Return calls and output without the expansions that give their operand's shape."""
    left: list[Call] = []
    stands: list[int] = []
    """For each call its number among those that are left, or that of the operand that it returns."""

    def renumbered(value: Any) -> Any:
        return Ref(stands[value.index]) if isinstance(value, Ref) else value

    for call in calls:
        operand = call.args[0] if call.kind == "function" and call.target in _EXPANSIONS else None
        if isinstance(operand, Ref) and calls[operand.index].shapes == call.shapes:
            stands.append(stands[operand.index])
            continue
        stands.append(len(left))
        args, kwargs = mapped(renumbered, (call.args, call.kwargs))
        left.append(replace(call, args=args, kwargs=kwargs))
    return left, mapped(renumbered, output)


def _same(a: Call, b: Call, sizes: Mapping[str, int]) -> bool:
    """Tell whether two calls are one, the numbers of the first taken at sizes."""
    if _facts(a) != _facts(b) or not (a.target is b.target or a.target == b.target):
        return False
    if a.draws is not None and not equal(a.draws, b.draws or (), sizes):
        return False
    return equal((a.args, a.kwargs), (b.args, b.kwargs), sizes)


def _facts(call: Call) -> tuple[Any, ...]:
    return (
        call.kind,
        call.module,
        call.leaf,
        _label(call),
        call.shapes,
        call.dtypes,
        call.random,
        call.reads,
        call.writes,
    )


def _label(call: Call) -> str:
    """Return a call's name without the number that it has among its like in one module."""
    if call.kind == "project":  # named after the call that it is a part of, which is its operand
        return ""
    return call.name.rpartition("_")[0] if call.kind in ("function", "read") else call.name
