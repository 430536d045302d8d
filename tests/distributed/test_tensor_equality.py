"""Ranks that share the tensors of their stages train as the plain model does, on every mesh."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
import torch

from tests.distributed.models import TRAININGS
from tests.distributed.processes import Pool
from tests.distributed.replicas import adam, compare

SHAPES = {"pp2 x tp2": (1, 1, 2, 2), "dp2 x tp2": (1, 2, 1, 2), "tp4": (1, 1, 1, 4)}
"""The degrees of replicas, of shards among them, of pp and of tp."""
MODELS = ["mlp", "grouped gpt", "experts", "vit"]
ONE, TWO = [[8], [5], [8]], [[4, 4], [5, 3], [8, 0]]


def rows_of(shape: tuple[int, ...]) -> Any:
    return TWO if shape[1] == 2 else ONE


def trained(name: str, shape: tuple[int, ...], rows: Any, options: dict[str, Any]) -> list[str]:
    """Compare one of the trainings; called in every process."""
    return compare(TRAININGS[name], shape, rows, **options)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["mlp", "grouped gpt"])
def test_two_ranks_train_as_the_plain_model(ranks: Pool, name: str) -> None:
    assert ranks(2).run(trained, name, (1, 1, 1, 2), ONE, {})[0] == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "shape"), [("grouped gpt", "pp2 x tp2"), ("mlp", "dp2 x tp2"), ("experts", "tp4"), ("vit", "pp2 x tp2")]
)
def test_meshes(ranks: Pool, name: str, shape: str) -> None:
    assert ranks(4).run(trained, name, SHAPES[shape], rows_of(SHAPES[shape]), {"make": adam})[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_20_steps(ranks: Pool, name: str, shape: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if name == "grouped gpt" and dtype == torch.float32:
        reason = "losses as small as 0.005 are up to 1.9e-6 off; the plain model's own are 2.7e-6 off float64 there"
        request.applymarker(pytest.mark.xfail(reason=reason))
    rows = list(islice(cycle(rows_of(SHAPES[shape])), 20))
    assert ranks(4).run(trained, name, SHAPES[shape], rows, {"dtype": dtype})[0] == []
