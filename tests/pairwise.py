"""Parametrisation by a part of a full product; the other combinations are marked slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return a parametrisation over all combinations of some arguments' values.

    Rows are taken greedily until every pair of values of two arguments is in one; the others are marked slow.
    """
    return _parametrized(axes, set(_covering(_product(axes))))


def in_turn(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return the same, with every value in a default run, in a combination with the others' values in turn."""
    longest = max(map(len, axes.values()))
    return _parametrized(axes, {tuple(place % len(own) for own in axes.values()) for place in range(longest)})


def _product(axes: dict[str, Sequence[Any]]) -> list[Row]:
    return list(product(*(range(len(values)) for values in axes.values())))


def _parametrized(axes: dict[str, Sequence[Any]], chosen: set[Row]) -> pytest.MarkDecorator:
    params = []
    for row in _product(axes):
        values = [own[place] for own, place in zip(axes.values(), row, strict=True)]
        params.append(pytest.param(*values, marks=() if row in chosen else pytest.mark.slow))
    ids: Callable[[Any], str] = lambda value: getattr(value, "__name__", str(value))  # noqa: E731
    return pytest.mark.parametrize(tuple(axes), params, ids=ids)


def _covering(rows: Sequence[Row]) -> list[Row]:
    left = {pair for row in rows for pair in _pairs(row)}
    found: list[Row] = []
    while left:
        best = max(rows, key=lambda row: len(left.intersection(_pairs(row))))
        left.difference_update(_pairs(best))
        found.append(best)
    return found


def _pairs(row: Row) -> list[Any]:
    return list(combinations(enumerate(row), 2))
