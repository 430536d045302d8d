"""What stages pay for tensors, against counting them one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autosplit.partition.cuts import Cuts
from autosplit.partition.graph import Tensor


@pytest.mark.parametrize("pins", [2, 5, 300])
def test_stages_pay_for_the_tensors_that_they_hold_in_part(pins: int) -> None:
    chance = random.Random(pins)
    count = 2 * pins + 14
    groups = [chance.sample(range(count), chance.randint(2, pins)) for _ in range(12)]
    tensors = [Tensor(float(chance.randint(0, 9)), group[0], frozenset(group[1:])) for group in groups]
    tensors.append(Tensor(1.0, groups[0][1], frozenset((groups[0][0], *groups[0][2:]))))
    sizes = sorted(chance.sample(range(count + 1), 12))
    columns = np.arange(count)[:, None] < np.array(sizes)
    cuts = Cuts(columns, tensors)
    assert len(cuts.cost) <= 12
    for ideal, begin in enumerate(sizes):
        for larger in (range(ideal, len(sizes)), range(ideal, len(sizes), 5), ()):
            ends = np.array(larger, dtype=np.int64)
            expected = [
                sum(
                    tensor.cost_s
                    for tensor in tensors
                    if 0 < sum(begin <= pin < sizes[end] for pin in tensor.pins) < len(tensor.pins)
                )
                for end in larger
            ]
            assert cuts.stage_cost(ideal, ends).tolist() == expected


def test_without_tensors_nothing_is_paid() -> None:
    assert Cuts(np.ones((2, 3), dtype=np.bool_), ()).stage_cost(0, np.array([1, 2])).tolist() == [0.0, 0.0]
