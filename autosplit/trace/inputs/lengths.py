"""The shapes of input tensors: rows, and the dimensions in which calls differ, as symbols."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from autosplit.trace.graph import LEAST, Length

Shape = tuple[int, ...]
Shapes = tuple[Shape | None, ...]
"""Of each input; None for what is no tensor."""


@lru_cache(maxsize=256)
def rows_of(shapes: Shapes, dims: Sequence[int | None]) -> int:
    """Return the batch size, or 0 when the inputs disagree or are empty."""
    pairs = ((shape, d) for shape, d in zip(shapes, dims, strict=True) if shape is not None and d is not None)
    rows = {shape[d] if d < len(shape) else 0 for shape, d in pairs}
    return rows.pop() if len(rows) == 1 else 0


def without_rows(shapes: Shapes, dims: Sequence[int | None]) -> Shapes:
    """Return the shapes with -1 where the rows are."""
    return tuple(
        shape if shape is None or d is None or d >= len(shape) else (*shape[:d], -1, *shape[d + 1 :])
        for shape, d in zip(shapes, dims, strict=True)
    )


def varying(before: Sequence[Shape], now: Sequence[Shape], known: Sequence[Length]) -> tuple[Length, ...] | None:
    """Return as symbols the dimensions of the input tensors that differ between two calls, and those ``known``.

    Both shapes have -1 where the rows are. Dimensions that change together, from one size to one other, are one symbol.
    None when nothing differs, or more than sizes do.
    """
    if [len(shape) for shape in before] != [len(shape) for shape in now] or list(before) == list(now):
        return None
    places: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    told = {axis for length in known for axis in length.places}
    for position, (old, new) in enumerate(zip(before, now, strict=True)):
        for dim, pair in enumerate(zip(old, new, strict=True)):
            if pair[0] != pair[1] or (position, dim) in told:
                places[pair].append((position, dim))
    if any(size < LEAST for pair in places for size in pair):
        return None
    return tuple(Length(f"dim{number}", tuple(axes)) for number, axes in enumerate(places.values()))


def with_lengths(shapes: Sequence[Shape], lengths: Sequence[Length], sizes: Mapping[str, int]) -> list[Shape]:
    """Return the shapes with the given sizes where symbols stand."""
    sized = [*shapes]
    for length in lengths:
        for position, dim in length.places:
            sized[position] = (*sized[position][:dim], sizes[length.name], *sized[position][dim + 1 :])
    return sized
