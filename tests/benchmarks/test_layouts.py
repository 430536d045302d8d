"""The comparison with published layouts: which rows are modelled, and how a constant from other sources is fitted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.layout_models import SHAPES, build, gpt
from benchmarks.layouts import Result, Row, judged, machine_of, rows


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


def test_the_decoder_runs() -> None:
    """Words in, logits out, with a plain attention as well."""
    model = build(gpt(1, 32, 4, 64, 8, plain=True, dropout=0.1))
    assert model(torch.zeros(2, 8, dtype=torch.int64, device="meta")).shape == (2, 8, 64)


def _result(name: str, source: str, *, published_s: float, predicted_s: float) -> Result:
    return Result(name, source, "A100 fp16", published_s, predicted_s, "fits", 1.0, 0.0, 0.0, "never", 1.0, 0.0)


def test_a_constant_comes_from_other_sources() -> None:
    """A row is scaled by what other sources came out as, never by its own; without any it has no error."""
    found = judged(
        [
            _result("a", "one", published_s=2.0, predicted_s=1.0),
            _result("b", "one", published_s=8.0, predicted_s=1.0),
            _result("c", "other", published_s=3.3, predicted_s=1.0),
        ]
    )
    assert [own["scale"] for own in found["judged"]] == [3.3, 3.3, 4.0]
    assert found["judged"][2]["error"] == pytest.approx(4.0 / 3.3 - 1, abs=1e-4)
    assert judged([_result("a", "one", published_s=2.0, predicted_s=1.0)])["judged"][0]["error"] is None
