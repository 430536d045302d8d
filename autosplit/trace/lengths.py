"""Which dimensions of a call's inputs have another size than in an earlier call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autosplit.trace.formula import LEAST, Length

Shape = tuple[int, ...]


def varying(before: Sequence[Shape], now: Sequence[Shape], known: Sequence[Length]) -> tuple[Length, ...] | None:
    """Return as symbols the dimensions of the input tensors that differ between two calls, and those ``known``.

    Both shapes have -1 where the rows are. Dimensions that change together, from one size to one other, are one symbol.
    None when nothing differs, or more than sizes do.
    """
    if [len(shape) for shape in before] != [len(shape) for shape in now] or list(before) == list(now):
        return None
    places: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    told = {place for length in known for place in length.places}
    for position, (old, new) in enumerate(zip(before, now, strict=True)):
        for dim, pair in enumerate(zip(old, new, strict=True)):
            if pair[0] != pair[1] or (position, dim) in told:
                places[pair].append((position, dim))
    if any(size < LEAST for pair in places for size in pair):
        return None
    return tuple(Length(f"dim{number}", tuple(own)) for number, own in enumerate(places.values()))


def sizes_at(lengths: Sequence[Length], shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the lengths in a call from the shapes of its input tensors."""
    return {length.name: shapes[length.places[0][0]][length.places[0][1]] for length in lengths}


def consistent(lengths: Sequence[Length], shapes: Sequence[Shape]) -> bool:
    """Tell whether dimensions that are one symbol have one size."""
    return all(len({shapes[position][dim] for position, dim in length.places}) == 1 for length in lengths)


def without_lengths(shapes: Sequence[Shape], lengths: Sequence[Length]) -> list[Shape]:
    """Return the shapes with -2 where symbols stand."""
    places = {place for length in lengths for place in length.places}
    return [
        tuple(-2 if (position, dim) in places else size for dim, size in enumerate(shape))
        for position, shape in enumerate(shapes)
    ]
