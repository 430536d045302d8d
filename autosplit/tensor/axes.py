"""Axes: what the dimensions of tensors are made of, found by following them through operations.

A dimension is an axis. Operations make axes equal (``a + b``), parts of one another (a view of 4096 as 32 × 128, a
split of 3·H in three), or new. An axis that is neither a product nor a row of others can be sharded: its size divided
by the ranks, everywhere where it occurs.

    q.weight [4096, 4096] ─► linear ─► view(…, 32, 128) ─► attention ─► reshape(…, 4096) ─► o.weight [4096, 4096]
              └ heads × width            heads  width                    heads × width              └ heads × width
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise


class Incompatible(Exception):
    """Two dimensions of one size are made of other parts."""


class Axis:
    """A dimension, or a part of one; equal ones are united.

    ``factors``: it is the product of these, the first outermost. ``segments``: it is these, one after the other.
    """

    __slots__ = ("_same", "factors", "segments", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._same: Axis | None = None
        self.factors: list[Axis] | None = None
        self.segments: list[Axis] | None = None

    def found(self) -> Axis:
        """Return what stands for all axes that this one is united with."""
        axis = self
        while axis._same is not None:
            axis = axis._same
        return axis

    def unite(self, other: Axis) -> None:
        """Make two axes one. Raises Incompatible when their parts do not fit together."""
        first, two = self.found(), other.found()
        if first is two or first.size == two.size == 1:
            return
        if first.size != two.size:
            raise Incompatible
        if two.is_atom:
            first, two = two, first
        if not first.is_atom:
            if first.segments and two.segments:
                _align_segments(first, two)
            else:
                _align(_factors(first), _factors(two))
            first, two = first.found(), two.found()
        if first is not two:
            first._same = two
            first.factors = first.segments = None

    @property
    def is_atom(self) -> bool:
        """Whether the axis has no parts."""
        return self.factors is None and self.segments is None

    def atoms(self) -> Iterator[Axis]:
        """Yield the axes without parts that this one is made of."""
        axis = self.found()
        parts = axis.factors or axis.segments
        if parts is None:
            yield axis
        for inner in parts or ():
            yield from inner.atoms()

    def pieces(self, atom: Axis) -> list[tuple[bool, int]]:
        """Return the runs of elements that a sharded atom cuts: ``(is cut, length)``, in order."""
        axis = self.found()
        if axis is atom:
            return [(True, axis.size)]
        if axis.segments is not None:
            return [piece for segment in axis.segments for piece in segment.pieces(atom)]
        if axis.factors is None:
            return [(False, axis.size)]
        result = [(False, 1)]
        for factor in reversed(axis.factors):
            inner, run = result, factor.pieces(atom)
            length = sum(n for _, n in inner)
            if any(is_cut for is_cut, _ in inner):
                if any(is_cut for is_cut, _ in run):
                    raise Incompatible
                result = inner * factor.found().size
            else:
                result = [(is_cut, n * length) for is_cut, n in run]
        return result


def product(axes: Sequence[Axis]) -> Axis:
    """Return the axis whose parts, outermost first, are others."""
    parts = [axis for axis in axes if axis.found().size != 1]
    if len(parts) == 1:
        return parts[0]
    result = Axis(math.prod(axis.found().size for axis in parts))
    result.factors = parts or None
    return result


def row(axes: Sequence[Axis]) -> Axis:
    """Return the axis that is others, one after the other."""
    if len(axes) == 1:
        return axes[0]
    result = Axis(sum(axis.found().size for axis in axes))
    result.segments = list(axes)
    return result


def split(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    """Return axes of other sizes that cover the same elements, as a view of a tensor makes them."""
    targets = [Axis(size) for size in sizes]
    _align([factor for axis in axes for factor in _factors(axis.found())], [t for t in targets if t.size != 1])
    return targets


def cut(axis: Axis, start: int, stop: int) -> Axis:
    """Return the axis of a slice."""
    axis = axis.found()
    if (start, stop) == (0, axis.size):
        return axis
    if axis.factors is not None:
        first, *rest = axis.factors
        inner = axis.size // first.found().size
        if start % inner or stop % inner:
            raise Incompatible
        return product([cut(first, start // inner, stop // inner), *rest])
    if axis.segments is None:
        bounds = sorted({0, start, stop, axis.size})
        axis.segments = [Axis(b - a) for a, b in pairwise(bounds)]
    else:
        _cut_segments(axis, [start, stop])
    offset, inside = 0, []
    for segment in axis.segments:
        if start <= offset and offset + segment.found().size <= stop:
            inside.append(segment)
        offset += segment.found().size
    return row(inside)


def _factors(axis: Axis) -> list[Axis]:
    axis = axis.found()
    if axis.factors is None:
        return [axis] if axis.size != 1 else []
    return [inner for factor in axis.factors for inner in _factors(factor)]


def _align(ones: list[Axis], twos: list[Axis]) -> None:
    """Unite two products of one size, from the outermost part on; parts are divided where the other's are smaller."""
    ones, twos = list(ones), list(twos)
    while ones and twos:
        ones[:1], twos[:1] = _factors(ones[0]), _factors(twos[0])
        first, two = ones.pop(0), twos.pop(0)
        if first is two:
            continue
        if first.size == two.size:
            first.unite(two)
        elif first.size % two.size == 0:
            outer, inner = _divide(first, two.size)
            twos.insert(0, two)
            ones[:0] = [outer, inner]
        elif two.size % first.size == 0:
            outer, inner = _divide(two, first.size)
            ones.insert(0, first)
            twos[:0] = [outer, inner]
        else:
            raise Incompatible
    if ones or twos:
        raise Incompatible


def _divide(axis: Axis, outer: int) -> tuple[Axis, Axis]:
    """Make an axis the product of one of size ``outer`` and another."""
    if axis.segments is not None:
        first, *others = axis.segments
        if len(axis.segments) != outer:
            raise Incompatible
        for other in others:
            first.unite(other)
        parts = Axis(outer), first
        axis.segments = None
    elif axis.factors is not None:
        raise Incompatible
    else:
        parts = Axis(outer), Axis(axis.size // outer)
    axis.factors = list(parts)
    return parts


def _cut_segments(axis: Axis, bounds: Sequence[int]) -> None:
    """Divide segments so that each bound lies between two."""
    assert axis.segments is not None
    parts: list[Axis] = []
    offset = 0
    for segment in axis.segments:
        segment = segment.found()
        inside = sorted({b - offset for b in bounds if offset < b < offset + segment.size})
        edges = [0, *inside, segment.size]
        parts += [cut(segment, a, b) for a, b in pairwise(edges)]
        offset += segment.size
    axis.segments = parts


def _align_segments(first: Axis, two: Axis) -> None:
    bounds = set()
    for axis in (first, two):
        offset = 0
        for segment in axis.segments or ():
            offset += segment.found().size
            bounds.add(offset)
    for axis in (first, two):
        _cut_segments(axis, sorted(bounds))
    for a, b in zip(first.segments or (), two.segments or (), strict=True):
        a.unite(b)


# -- what a rank holds -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shard:
    """A tensor cut along one dimension: of each piece every rank has an equal part.

    Attributes:
        dim: the dimension.
        pieces: ``(count, length)``: the dimension is ``count`` pieces of ``length`` elements, and so on. A plain shard
            has one piece; two in a fused gate and up projection, whose halves are cut each for itself.
    """

    dim: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def plain(self) -> bool:
        """Whether ranks hold one run of elements each, as with ``torch.distributed.tensor.Shard``."""
        return len(self.pieces) == 1 and self.pieces[0][0] == 1

    def indices(self, rank: int, ranks: int) -> list[range]:
        """Return which elements of the dimension a rank has, in runs."""
        runs, offset = [], 0
        for count, length in self.pieces:
            share = length // ranks
            for _ in range(count):
                runs.append(range(offset + rank * share, offset + (rank + 1) * share))
                offset += length
        return runs

    def __str__(self) -> str:
        if self.plain:
            return f"shard({self.dim})"
        return f"shard({self.dim}: {' + '.join(f'{n} × {length}' for n, length in self.pieces)})"


def shard_of(dims: Sequence[Axis], atom: Axis) -> Shard | None:
    """Return how a tensor is cut when an axis is sharded.

    None: it is not. Raises Incompatible where it occurs in two dimensions, or in a part of one only.
    """
    shard: Shard | None = None
    for number, dim in enumerate(dims):
        if atom not in set(dim.atoms()):
            continue
        pieces = dim.pieces(atom)
        if shard is not None or not all(is_cut for is_cut, _ in pieces):
            raise Incompatible
        lengths = [(len(list(group)), length) for length, group in groupby(length for _, length in pieces)]
        shard = Shard(number, tuple(lengths))
    return shard


def shard_if_any(dims: Sequence[Axis], atom: Axis) -> Shard | None:
    """Return how a tensor is cut when an axis is sharded; None where it is not, or cannot be."""
    try:
        return shard_of(dims, atom)
    except Incompatible:
        return None
