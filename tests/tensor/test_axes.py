"""Axes: views and slices divide them, parts of a sharded one are where they should be; and the cheapest choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autosplit.tensor.axes import Axis, Incompatible, Shard, cut, product, row, shard_of, split
from autosplit.tensor.solve import Table, cheapest


def test_a_view_divides_an_axis_and_another_view_puts_it_together() -> None:
    width = Axis(24)
    heads, size = split([width], [4, 6])
    assert [*width.atoms()] == [heads.found(), size.found()]
    product([heads, size]).unite(width)
    assert shard_of([Axis(2), width], heads.found()) == Shard(1, ((1, 24),))
    assert shard_of([Axis(2), width], size.found()) == Shard(1, ((4, 6),))


def test_slices_are_rows_of_parts() -> None:
    fused = Axis(20)
    first, second = cut(fused, 0, 12), cut(fused, 12, 20)
    with pytest.raises(Incompatible):
        shard_of([fused], first.found())
    inner, _ = split([first], [4, 3])
    inner.unite(split([second], [4, 2])[0])
    shard = shard_of([fused], inner.found())
    assert shard == Shard(0, ((1, 12), (1, 8)))
    assert shard.indices(1, 2) == [range(6, 12), range(16, 20)]
    assert not shard.plain


def test_halves_of_one_axis_are_a_product_too() -> None:
    fused = Axis(8)
    one, two = cut(fused, 0, 4), cut(fused, 4, 8)
    one.unite(two)
    assert shard_of([fused], one.found()) == Shard(0, ((2, 4),))
    outer, inner = split([fused], [2, 4])
    assert outer.size == 2
    assert inner.found() is one.found()
    row([one, two]).unite(fused)


def test_parts_that_do_not_fit_are_told() -> None:
    one, two = Axis(12), Axis(12)
    split([one], [3, 4])
    split([two], [4, 3])
    with pytest.raises(Incompatible):
        one.unite(two)
    with pytest.raises(Incompatible):
        shard_of([Axis(2), three := Axis(5), three], three)


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
