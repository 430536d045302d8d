"""A recording at one row that differs from the merged one by operations that return their operand, and by nothing else.

transformers leaves out an ``expand`` to the number of rows where there is one row:

    3 rows   arange ─► unsqueeze [1, 16] ─► expand [3, 16] ─► diff
    1 row    arange ─► unsqueeze [1, 16] ───────────────────► diff         expand [1, 16] of [1, 16] changes nothing

Operations that give a tensor of their operand's shape and dtype, and can then hold nothing else than its values, may be
on one side alone, and a reference to one is a reference to its operand. The graph keeps those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from autosplit.trace.formula import ROWS
from autosplit.trace.merge import MergedCall, MergedRecording, equal, evaluated, matches, same_constants
from autosplit.trace.recording import Call, Recording, Ref, attributes_in

_VIEWS = "expand expand_as broadcast_to view view_as reshape reshape_as flatten narrow __getitem__".split()
"""What gives all of its operand, in order and in the same memory, wherever it gives the same shape."""
_COPIES = ("contiguous", "clone", "repeat", "tile")
"""The same, but for memory that may be new; strides may be others."""


def holds_at(
    merged: MergedRecording, recording: Recording, *, rows: int, lengths: Mapping[str, int] = MappingProxyType({})
) -> bool:
    """Tell whether a recording at ``rows`` rows does what the merged one does there.

    At one row operations that change nothing may be left out, or be done besides.
    """
    if matches(merged, recording, rows=rows, lengths=lengths):
        return True
    if rows != 1 or not same_constants(merged.recording, recording):
        return False
    sizes = {**lengths, ROWS: 1}
    expected = [_at_one_row(call, lengths) for call in merged.calls]
    views, copies = _functions(*_VIEWS), _functions(*_COPIES)
    if any(map(_writes_or_draws, (*expected, *recording.calls))):  # what is new memory could be told then
        copies = frozenset()
    graph, model = _Side(expected, views | copies), _Side(recording.calls, views | copies)
    while graph.left or model.left:
        if graph.left and model.left and _same(graph, model, sizes):
            graph.take()
            model.take()
        elif graph.left and graph.operand is not None and _gives_its_shape(expected, graph.next, sizes):
            graph.skip()
        elif model.left and model.operand is not None and model.next.target in views:
            model.skip()  # no copy: where the model makes one, the graph's views could fail without it
        else:
            return False
    return _equal(graph, model, merged.output, recording.output, sizes)


class _Side:
    """Calls at one row, gone through one by one; ``functions`` are those that may return what they are given."""

    def __init__(self, calls: Sequence[Call], functions: frozenset[Any]) -> None:
        self.calls = calls
        self.functions = functions
        self.taken = 0
        self.stands: list[int] = []
        """What stands for each call: its number among those taken, or what stands for the operand that it returns."""

    @property
    def left(self) -> bool:
        """Whether there is a next call."""
        return len(self.stands) < len(self.calls)

    @property
    def next(self) -> Call:
        """The next call."""
        return self.calls[len(self.stands)]

    @property
    def operand(self) -> Ref | None:
        """The operand that the next call returns if it gives the shape noted; None where it may give something else."""
        call = self.next
        if call.kind != "function" or call.target not in self.functions:
            return None
        if not call.args or not isinstance(call.args[0], Ref) or attributes_in((call.args, call.kwargs)):
            return None
        if call.target is torch.Tensor.__getitem__ and not _is_slices(call.args[1]):
            return None
        operand = self.calls[call.args[0].index]
        same = len(call.shapes) == 1 and (call.shapes, call.dtypes) == (operand.shapes, operand.dtypes)
        return call.args[0] if same and not _writes_or_draws(call) else None

    def take(self) -> None:
        """Go on; the next call has its like on the other side."""
        operand = self.operand
        self.stands.append(self.taken if operand is None else self.stands[operand.index])
        self.taken += 1

    def skip(self) -> None:
        """Go on; the next call returns its operand."""
        assert self.operand is not None
        self.stands.append(self.stands[self.operand.index])


def _gives_its_shape(calls: Sequence[Call], call: Call, sizes: Mapping[str, int]) -> bool:
    """Tell whether a merged call gives the shape that it is said to give; it was not run at one row."""

    def tensor(value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        of = calls[value.index]
        return torch.empty(of.shapes[0], dtype=of.dtypes[0], device="meta")

    args, kwargs = evaluated((call.args, call.kwargs), sizes)
    try:
        made = call.target(*map(tensor, args), **{key: tensor(value) for key, value in kwargs.items()})
    except Exception:  # it cannot be told, or the graph would fail there
        return False
    return tuple(made.shape) == call.shapes[0] and made.dtype == call.dtypes[0]


def _at_one_row(merged: MergedCall, lengths: Mapping[str, int]) -> Call:
    """Return a merged call as it would be recorded at one row, but for the numbers in its arguments."""
    made = Call.__new__(Call)
    made.__dict__.update(merged.call.__dict__)
    made.args, made.kwargs, made.draws = merged.args, merged.kwargs, merged.draws
    made.shapes = [tensor.shape_at(1, lengths) for tensor in merged.tensors]
    return made


def _same(graph: _Side, model: _Side, sizes: Mapping[str, int]) -> bool:
    """Tell whether the next calls of both sides are one."""
    a, b = graph.next, model.next
    if (a.kind, a.module, a.leaf, _label(a)) != (b.kind, b.module, b.leaf, _label(b)):
        return False
    if not (a.target is b.target or a.target == b.target) or (a.shapes, a.dtypes) != (b.shapes, b.dtypes):
        return False
    if a.draws is not None and not equal(a.draws, b.draws or (), sizes):
        return False
    told = (a.random, a.reads, a.writes) == (b.random, b.reads, b.writes)
    return told and _equal(graph, model, (a.args, a.kwargs), (b.args, b.kwargs), sizes)


def _equal(graph: _Side, model: _Side, expected: Any, value: Any, sizes: Mapping[str, int]) -> bool:
    """Tell whether nested arguments of both sides are the same, the numbers of the graph's taken at sizes."""
    if isinstance(expected, Ref):
        return isinstance(value, Ref) and graph.stands[expected.index] == model.stands[value.index]
    if isinstance(expected, (list, tuple)):
        if not isinstance(value, type(expected)) or len(value) != len(expected):
            return False
        return all(_equal(graph, model, e, v, sizes) for e, v in zip(expected, value, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or list(expected) != list(value):
            return False
        return all(_equal(graph, model, part, value[key], sizes) for key, part in expected.items())
    if isinstance(expected, slice) and isinstance(value, slice):
        parts = ((getattr(expected, part), getattr(value, part)) for part in ("start", "stop", "step"))
        return all(_equal(graph, model, e, v, sizes) for e, v in parts)
    return equal(expected, value, sizes)


def _label(call: Call) -> str:
    """Return a call's name without the number that it has among its like in one module."""
    if call.kind == "project":  # named after the call that it is a part of, which is its operand
        return ""
    return call.name.rpartition("_")[0] if call.kind in ("function", "read") else call.name


def _writes_or_draws(call: Call) -> bool:
    return bool(call.mutates or call.writes or call.random)


def _is_slices(index: Any) -> bool:
    """Tell whether an index takes ranges only: it then gives all where it gives as many."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is Ellipsis or isinstance(part, slice) for part in parts)


def _functions(*names: str) -> frozenset[Any]:
    """Return torch's functions and tensor methods of these names."""
    found = (getattr(owner, name, None) for owner in (torch, torch.Tensor) for name in names)
    return frozenset(function for function in found if function is not None)
