"""Axes: views and slices divide them, and parts of a sharded one are where they should be."""

from __future__ import annotations

import pytest

from autosplit.tensor.axes import Axis, Incompatible, Shard, cut, product, row, shard_of, split


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
