"""The cheapest choice is that of trying all; where it is not, it says which variables were fixed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autosplit.tensor.solve import Table, cheapest


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_is_the_least_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = {name: int(random.integers(1, 4)) for name in "abcdef"}
    scopes = [random.choice([*sizes], size=random.integers(1, 4), replace=False) for _ in range(8)]
    tables = [Table(tuple(scope), random.random([sizes[name] for name in scope])) for scope in scopes]

    def cost(chosen: dict[str, int]) -> float:
        return sum(float(table.costs[tuple(chosen[name] for name in table.variables)]) for table in tables)

    every = itertools.product(*(range(size) for size in sizes.values()))
    found = cheapest(tables)
    assert found.fixed == ()
    assert cost(dict.fromkeys(sizes, 0) | found.chosen) == pytest.approx(
        min(cost(dict(zip(sizes, choice, strict=True))) for choice in every)
    )


def test_variables_that_too_many_others_touch_are_told() -> None:
    random = np.random.default_rng(0)
    tables = [Table(pair, random.random((4, 4))) for pair in itertools.combinations(range(12), 2)]
    found = cheapest(tables)
    assert found.fixed
    assert {*found.chosen} == {*range(12)}
