"""Replicas of a pipeline, each called with its own rows, train as the plain model does on all of them."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
import torch

from tests.distributed.processes import Pool
from tests.distributed.replicas import adam, compare

SHAPES = {"dp2 x pp2": (2, 2), "dp4": (4, 1)}
EVEN = [[4, 4], [4, 4], [4, 4]]
RAGGED = [[5, 3], [1, 7], [6, 2]]
EMPTY = [[5, 3], [8, 0], [0, 6], [2, 4]]
OF_FOUR = [[3, 1, 5, 2], [2, 0, 0, 6], [0, 4, 3, 1]]
LONG = ["mlp", "tied gpt with dropout", "vit", "skips", "experts"]
"""Models that are trained for 20 steps."""


def said(name: str) -> dict[str, Any]:
    """Return what has to be said of a loss of the user's own."""
    return {"reduction": "mean"} if name == "relative bias" else {}


@pytest.mark.quick
@pytest.mark.parametrize("rows", [EVEN, RAGGED, EMPTY], ids=["even", "ragged", "empty"])
@pytest.mark.parametrize("name", ["mlp", "tied gpt with dropout"])
def test_replicas_train_as_the_plain_model_on_all_rows(ranks: Pool, name: str, rows: Any) -> None:
    assert ranks(4).run(compare, name, (2, 2), rows)[0] == []


@pytest.mark.quick
@pytest.mark.parametrize("name", ["mlp", "relative bias", "own loss"])
def test_replicas_alone_train_as_the_plain_model(ranks: Pool, name: str) -> None:
    """Each replica is one rank; the losses are torch's, the user's, and the model's own."""
    assert ranks(4).run(compare, name, (4, 1), OF_FOUR, **said(name))[0] == []


@pytest.mark.parametrize("name", ["relative bias", "own loss", "tied gpt of changing length", "dropout"])
def test_kinds_of_losses_and_models(ranks: Pool, name: str) -> None:
    rows = [[5, 4], [2, 6], [9, 1], [4, 5]]
    assert ranks(4).run(compare, name, (2, 2), rows, **said(name))[0] == []


@pytest.mark.parametrize("options", [{"every": 2}, {"make": adam}], ids=["accumulated", "adam"])
def test_gradients_of_several_steps_and_optimizers(ranks: Pool, options: dict[str, Any]) -> None:
    assert ranks(4).run(compare, "dropout", (2, 2), [*RAGGED, [3, 3]], **options)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LONG)
def test_20_steps(ranks: Pool, name: str, shape: str, dtype: torch.dtype) -> None:
    rows = list(islice(cycle(EMPTY if shape == "dp2 x pp2" else OF_FOUR), 20))
    assert ranks(4).run(compare, name, SHAPES[shape], rows, dtype=dtype)[0] == []
