"""The comparison with published layouts: which rows are modelled, and how a constant from other sources is fitted."""

from __future__ import annotations

import pytest

from benchmarks.layout_models import SHAPES, build
from benchmarks.layouts import Row, machine_of, rows


def test_every_row_is_modelled_or_says_why_not() -> None:
    """Devices, batch and degrees of a modelled row fit together; the others are those with cp, and without batches."""
    every = list(rows())
    modelled = [own for own in every if isinstance(own, Row)]
    assert len(modelled) == 31
    assert {own[1] for own in every if isinstance(own, tuple)} == {
        "context parallelism is not modelled",
        "neither its microbatches nor its stages per device are published with it",
    }
    for row in modelled:
        assert len(machine_of(row)) == row.parallel.ranks
        assert row.batch % (row.parallel.dp * row.micro_batch) == 0


@pytest.mark.parametrize(("name", "billions"), [("GPT3-5B", 5.25)])
def test_shapes_have_their_parameters(name: str, billions: float) -> None:
    """The names say about how many parameters there are."""
    count = sum(parameter.numel() for parameter in build(SHAPES[name]).parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.03)
