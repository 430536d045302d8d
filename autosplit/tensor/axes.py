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
        one, two = self.found(), other.found()
        if one is two or one.size == two.size == 1:
            return
        if one.size != two.size:
            raise Incompatible
        if two.is_atom:
            one, two = two, one
        if not one.is_atom:
            if one.segments and two.segments:
                _align_segments(one, two)
            else:
                _align(_factors(one), _factors(two))
            one, two = one.found(), two.found()
        if one is not two:
            one._same = two
            one.factors = one.segments = None

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
        for part in parts or ():
            yield from part.atoms()

    def pieces(self, atom: Axis) -> list[tuple[bool, int]]:
        """Return the runs of elements that a sharded atom cuts: ``(is cut, length)``, in order."""
        axis = self.found()
        if axis is atom:
            return [(True, axis.size)]
        if axis.segments is not None:
            return [piece for part in axis.segments for piece in part.pieces(atom)]
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
    made = Axis(math.prod(axis.found().size for axis in parts))
    made.factors = parts or None
    return made


def row(axes: Sequence[Axis]) -> Axis:
    """Return the axis that is others, one after the other."""
    if len(axes) == 1:
        return axes[0]
    made = Axis(sum(axis.found().size for axis in axes))
    made.segments = list(axes)
    return made


def split(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    """Return axes of other sizes that cover the same elements, as a view of a tensor makes them."""
    targets = [Axis(size) for size in sizes]
    _align([part for axis in axes for part in _factors(axis.found())], [t for t in targets if t.size != 1])
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
    for part in axis.segments:
        if start <= offset and offset + part.found().size <= stop:
            inside.append(part)
        offset += part.found().size
    return row(inside)


def _factors(axis: Axis) -> list[Axis]:
    axis = axis.found()
    if axis.factors is None:
        return [axis] if axis.size != 1 else []
    return [part for factor in axis.factors for part in _factors(factor)]


def _align(ones: list[Axis], twos: list[Axis]) -> None:
    """Unite two products of one size, from the outermost part on; parts are divided where the other's are smaller."""
    ones, twos = list(ones), list(twos)
    while ones and twos:
        ones[:1], twos[:1] = _factors(ones[0]), _factors(twos[0])
        one, two = ones.pop(0), twos.pop(0)
        if one is two:
            continue
        if one.size == two.size:
            one.unite(two)
        elif one.size % two.size == 0:
            outer, inner = _divide(one, two.size)
            twos.insert(0, two)
            ones[:0] = [outer, inner]
        elif two.size % one.size == 0:
            outer, inner = _divide(two, one.size)
            ones.insert(0, one)
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
    for part in axis.segments:
        part = part.found()
        inside = sorted({b - offset for b in bounds if offset < b < offset + part.size})
        edges = [0, *inside, part.size]
        parts += [cut(part, a, b) for a, b in pairwise(edges)]
        offset += part.size
    axis.segments = parts


def _align_segments(one: Axis, two: Axis) -> None:
    bounds = set()
    for axis in (one, two):
        offset = 0
        for part in axis.segments or ():
            offset += part.found().size
            bounds.add(offset)
    for axis in (one, two):
        _cut_segments(axis, sorted(bounds))
    for a, b in zip(one.segments or (), two.segments or (), strict=True):
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
            part = length // ranks
            for _ in range(count):
                runs.append(range(offset + rank * part, offset + (rank + 1) * part))
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
    found: Shard | None = None
    for number, dim in enumerate(dims):
        if atom not in set(dim.atoms()):
            continue
        pieces = dim.pieces(atom)
        if found is not None or not all(is_cut for is_cut, _ in pieces):
            raise Incompatible
        lengths = [(len(list(group)), length) for length, group in groupby(length for _, length in pieces)]
        found = Shard(number, tuple(lengths))
    return found


def shard_if_any(dims: Sequence[Axis], atom: Axis) -> Shard | None:
    """Return how a tensor is cut when an axis is sharded; None where it is not, or cannot be."""
    try:
        return shard_of(dims, atom)
    except Incompatible:
        return None
