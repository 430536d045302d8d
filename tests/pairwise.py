"""Parametrisation by a part of a full product; the other combinations are marked slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return a parametrisation over all combinations of some arguments' values.

    Rows are taken greedily until every pair of values of two arguments is in one; the others are marked slow.
    """
    rows = _product(axes)
    return _parametrized(axes, rows, set(_covering(rows)))


def in_turn(*, share: tuple[int, int] = (0, 1), rest: bool = True, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return a parametrisation with every value in a default run, in a combination with the others' values in turn.

    What else it takes until every pair of values of two arguments is in one combination is marked slow;
    ``rest=False`` leaves that out, where the second argument does what it does whatever the first one is.
    ``share=(1, 4)`` leaves a default run every fourth value, from number 1 on, where other tests take the others.
    """
    first, every = share
    longest = max(map(len, axes.values()))

    def row(place: int) -> Row:
        return tuple(place if len(own) == longest else place // every % len(own) for own in axes.values())

    rows = [row(place) for place in range(longest)]
    default = set(rows[first::every])
    if rest:
        rows += _covering(_product(axes), besides=rows)
    return _parametrized(axes, sorted(rows), default)


def mostly_slow(values: Iterable[Any], *default: Any) -> list[Any]:
    """Return parameters of which only ``default`` are in a default run; the others are marked slow."""
    return [pytest.param(value, marks=() if value in default else pytest.mark.slow) for value in values]


def _product(axes: dict[str, Sequence[Any]]) -> list[Row]:
    return list(product(*(range(len(values)) for values in axes.values())))


def _parametrized(axes: dict[str, Sequence[Any]], rows: Sequence[Row], chosen: set[Row]) -> pytest.MarkDecorator:
    params = []
    for row in rows:
        values = [own[place] for own, place in zip(axes.values(), row, strict=True)]
        params.append(pytest.param(*values, marks=() if row in chosen else pytest.mark.slow))
    ids: Callable[[Any], str] = lambda value: getattr(value, "__name__", str(value))  # noqa: E731
    return pytest.mark.parametrize(tuple(axes), params, ids=ids)


def _covering(rows: Sequence[Row], besides: Sequence[Row] = ()) -> list[Row]:
    left = {pair for row in rows for pair in _pairs(row)} - {pair for row in besides for pair in _pairs(row)}
    found: list[Row] = []
    while left:
        best = max(rows, key=lambda row: len(left.intersection(_pairs(row))))
        left.difference_update(_pairs(best))
        found.append(best)
    return found


def _pairs(row: Row) -> list[Any]:
    return list(combinations(enumerate(row), 2))
