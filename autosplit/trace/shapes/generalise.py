"""One recording for all lengths: dimensions that two calls gave at two sizes become symbols.

    kept recording   x [rows, 37]     numbers are a*rows + b
    new call         x [8, 52]        recorded once with ``rows`` and ``dim0`` as symbols, 8 and 52 at hand
    both agree       every number of the first is a formula of the second at rows 3, 4 and dim0 = 37
    accepted         holds wherever the second's conditions do; the first says how rows behave and what things cost

The conditions are all that the model's Python asked about the symbols, so they say for which other lengths it would do
the same, without running it there.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx.node import map_aggregate

from autosplit.errors import ForeignSuppressed
from autosplit.trace.graph import (
    LEAST,
    ROWS,
    Formula,
    Length,
    Number,
    Size,
    Symbol,
    TensorInfo,
    affine,
    evaluate,
    lengths_in,
    symbols_in,
)
from autosplit.trace.inputs.lengths import Shape
from autosplit.trace.inputs.signature import GradAutocastState
from autosplit.trace.recording.merge import (
    BATCH_SIZES,
    MergedCall,
    MergedRecording,
    changed_constant,
)
from autosplit.trace.recording.random_watch import Draw
from autosplit.trace.recording.recording import (
    Differs,
    Recording,
    Refusal,
    Unexpected,
    mapped_together,
)
from autosplit.trace.recording.run import FlatInputs, run_python
from autosplit.trace.scope import Scope, is_quantised


@dataclass(frozen=True)
class Domain:
    """The sizes for which a recording with lengths holds.

    Attributes:
        lengths: the dimensions that are symbols.
        conditions: what must be true of the sizes when there are several rows.
        single: what must be true of the lengths when there is one row; None: not known.
    """

    lengths: tuple[Length, ...]
    conditions: tuple[Number, ...]
    single: tuple[Number, ...] | None = None

    def holds(self, rows: int, lengths: Mapping[str, int]) -> bool:
        """Tell whether the recording is what the model does for a batch of ``rows`` rows at these lengths."""
        conditions = self.conditions if rows >= LEAST else self.single
        if conditions is None or any(length < LEAST for length in lengths.values()):
            return False
        return all(evaluate(condition, {**lengths, ROWS: rows}) for condition in conditions)


def generalise(
    model: nn.Module,
    merged: MergedRecording,
    scope: Scope,
    inputs: FlatInputs,
    *,
    rows: int,
    lengths: Sequence[Length],
    before: Sequence[Shape],
) -> tuple[MergedRecording, Domain] | None:
    """Record a model with lengths as symbols; return the recording that serves all of them, or None.

    Args:
        model: the model; it is as before at the end.
        merged: a recording of the model at other lengths.
        scope: what it entered; there is no general recording with opaque modules whose shapes are known by running, as
            those of quantised layers are not.
        inputs: the new call's.
        rows: its number of rows.
        lengths: the dimensions to make symbols.
        before: the shapes of the input tensors for which ``merged`` was made.
    """
    opaque = not all(is_quantised(model.get_submodule(path)) for path in scope.opaque)
    if opaque or scope.blocks or not all(_is_open(value) for value in merged.recording.constants.values()):
        return None
    now = lengths_in(lengths, inputs.shapes())
    first = lengths_in(lengths, before)
    recorded = lengths_in(merged.lengths, before)
    symbolic = _symbolic(model, scope, inputs, max(rows, LEAST), lengths, now)
    if symbolic is None:
        return None
    recording, converted, conditions = symbolic
    domain = Domain(tuple(lengths), conditions)
    if not (domain.holds(max(rows, LEAST), now) and domain.holds(max(rows, LEAST), first)):
        return None
    merged.recording.changed |= recording.changed
    points = [({**recorded, ROWS: r}, {**first, ROWS: r}) for r in BATCH_SIZES]
    wide = _widened(merged, recording, converted, points)
    return None if wide is None else (replace(wide, lengths=tuple(lengths)), domain)


def for_one_row(
    model: nn.Module, merged: MergedRecording, scope: Scope, inputs: FlatInputs, domain: Domain
) -> Domain | None:
    """Return a domain that covers batches of one row too, or None when the model does other things there."""
    now = lengths_in(domain.lengths, inputs.shapes())
    symbolic = _symbolic(model, scope, inputs, 1, domain.lengths, now)
    if symbolic is None:
        return None
    recording, converted, conditions = symbolic
    points = [({**sizes, ROWS: 1}, sizes) for sizes in _around(now)]
    return None if _widened(merged, recording, converted, points) is None else replace(domain, single=conditions)


def _around(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return sizes beside the given ones, enough to tell two polynomials of a low degree apart."""
    return [
        {name: size + more * (1 + (i == number)) for i, (name, size) in enumerate(sizes.items())}
        for more in range(17)
        for number in range(len(sizes))
    ]


def _is_open(value: Any) -> bool:
    """Tell whether a constant of a recording can hide no size: closures and objects of the model's own might."""
    if isinstance(value, types.FunctionType):
        is_named = getattr(sys.modules.get(value.__module__), value.__name__, None) is value
        return value.__closure__ is None and (is_named or not (value.__defaults__ or value.__kwdefaults__))
    return isinstance(value, (torch.Tensor, GradAutocastState, dict, type, *_BUILTIN))


_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def _symbolic(
    model: nn.Module, scope: Scope, inputs: FlatInputs, rows: int, lengths: Sequence[Length], now: Mapping[str, int]
) -> tuple[Recording, Any, tuple[Number, ...]] | None:
    """Record with symbols; return the recording, its numbers as formulas call by call, and the conditions."""
    from autosplit.trace.shapes.symbols import (  # takes seconds to import, and few models need it
        NoFormula,
        SymbolicSizes,
    )

    with ForeignSuppressed(), contextlib.suppress(NoFormula, Refusal, Unexpected):
        sizes = SymbolicSizes(rows, lengths, now)
        recording = run_python(model, inputs, rows=rows, scope=scope, symbols=sizes).recording
        every = [(c.args, c.kwargs, list(c.shapes), c.draws) for c in recording.calls]
        converted = map_aggregate([*every, recording.output], sizes.number)
        return recording, converted, sizes.conditions()
    return None  # whatever a symbol does to the model, its lengths are then recorded one by one


Points = Sequence[tuple[Mapping[str, int], Mapping[str, int]]]
"""Sizes at which the kept recording and the symbolic one must agree."""


def _widened(
    merged: MergedRecording, recording: Recording, converted: Sequence[Any], points: Points
) -> MergedRecording | None:
    """Return the merged recording with the symbolic one's formulas; None where they differ at some point."""
    constants = merged.recording.constants.keys() == recording.constants.keys()
    if len(merged.calls) != len(recording.calls) or not constants:
        return None
    if changed_constant(merged.recording, recording) is not None:
        return None
    compare = _Compare(points)
    calls = []
    try:
        for kept, call, (args, kwargs, shapes, draws) in zip(merged.calls, recording.calls, converted, strict=False):
            first = kept.call
            same = (first.name, first.kind, first.dtypes) == (call.name, call.kind, call.dtypes)
            if not same or not (first.target is call.target or first.target == call.target):
                return None
            if len(kept.tensors) != len(shapes):
                return None
            tensors = tuple(compare.tensor(info, shape) for info, shape in zip(kept.tensors, shapes, strict=True))
            drawn = None if kept.draws is None else compare(kept.draws, tuple(map(_as_kept, draws or ())))
            calls.append(MergedCall(first, compare(kept.args, args), compare(kept.kwargs, kwargs), tensors, drawn))
        output = compare(merged.output, converted[-1])
    except Differs:
        return None
    return MergedRecording(tuple(calls), output, merged.recording)


def _as_kept(draw: Draw) -> Draw:
    """Return a draw of dropout as the CPU makes it: with symbols torch takes dropout apart in another way."""
    if draw.op is not torch.ops.aten.native_dropout.default:
        return draw
    return Draw(torch.ops.aten.bernoulli_.float, (draw.out, 1.0 - draw.args[1]), (), draw.out)


class _Compare:
    """Compares a kept value with one of the symbolic recording, and returns the more general of the two."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __call__(self, kept: Any, symbolic: Any) -> Any:
        return mapped_together(self._leaf, kept, symbolic)

    def _leaf(self, kept: Any, symbolic: Any) -> Any:
        if _is_number(kept) and _is_number(symbolic):
            return self._number(kept, symbolic)
        if type(kept) is not type(symbolic) or not (kept is symbolic or kept == symbolic):
            raise Differs
        return kept

    def tensor(self, info: TensorInfo, shape: Sequence[Number]) -> TensorInfo:
        """Return a tensor's sizes as formulas; what is a multiple of the rows must be one at every length."""
        if len(info.shape) != len(shape):
            raise Differs
        sizes = (self._size(size, number) for size, number in zip(info.shape, shape, strict=True))
        return replace(info, shape=tuple(sizes))

    def _size(self, size: Size, number: Number) -> Size:
        kept = size.number if size.number is not None else affine(size.per_row, size.constant)
        general = self(kept, number)
        if symbols_in(general) <= {ROWS}:
            return replace(size, number=None)
        batched = ROWS in symbols_in(general)
        if batched != bool(size.per_row):
            raise Differs
        around = _around({name: length for name, length in self.points[0][1].items() if name != ROWS})
        if batched and not size.constant and any(evaluate(general, {**at, ROWS: 0}) for at in around):
            raise Differs
        return replace(size, number=general)

    def _number(self, kept: Any, symbolic: Any) -> Any:
        for sizes, at in self.points:
            if evaluate(kept, sizes) != evaluate(symbolic, at):
                raise Differs
        free = symbols_in(symbolic)
        if free != {ROWS}:
            return symbolic
        at_none, at_one = (evaluate(symbolic, {ROWS: rows}) for rows in (0, 1))
        return affine(at_one - at_none, at_none)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Formula, Symbol)) and not isinstance(value, bool)
