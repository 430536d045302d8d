"""Ranks that share the tensors of their stages train as the plain model does, on every mesh."""

from __future__ import annotations

import math
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit import autosplit
from tests.distributed.models import WIDTH
from tests.distributed.processes import Pool
from tests.distributed.replicas import adam, compare, mesh_of, replica_of

SHAPES = {"pp2 x tp2": (1, 1, 2, 2), "dp2 x tp2": (1, 2, 1, 2), "tp4": (1, 1, 1, 4)}
"""The degrees of replicas, of shards among them, of pp and of tp."""
MODELS = ["mlp", "grouped gpt", "experts", "vit"]
ONE, TWO = [[8], [5], [8]], [[4, 4], [5, 3], [8, 0]]


def rows_of(shape: tuple[int, ...]) -> Any:
    return TWO if shape[1] == 2 else ONE


@pytest.mark.quick
@pytest.mark.parametrize("name", ["mlp", "grouped gpt"])
def test_two_ranks_train_as_the_plain_model(ranks: Pool, name: str) -> None:
    assert ranks(2).run(compare, name, (1, 1, 1, 2), ONE)[0] == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "shape"), [("grouped gpt", "pp2 x tp2"), ("mlp", "dp2 x tp2"), ("experts", "tp4"), ("vit", "pp2 x tp2")]
)
def test_meshes(ranks: Pool, name: str, shape: str) -> None:
    assert ranks(4).run(compare, name, SHAPES[shape], rows_of(SHAPES[shape]), make=adam)[0] == []


@pytest.mark.parametrize(
    ("name", "shape", "reshard"),
    [
        ("grouped gpt", (1, 2, 1, 2), "never"),
        ("experts", (1, 2, 1, 2), "always"),
        ("tied gpt with dropout", (1, 2, 1, 2), "always"),
        pytest.param("grouped gpt", (1, 2, 2, 2), "always", marks=pytest.mark.slow),
        pytest.param("tied gpt with dropout", (1, 2, 2, 2), "never", marks=pytest.mark.slow),
        pytest.param("vit", (2, 2, 1, 2), "always", marks=pytest.mark.slow),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_replicas_share_out_parts_of_tp(ranks: Pool, name: str, shape: tuple[int, ...], reshard: str) -> None:
    options = {"parallelize": "fsdp", "fsdp_reshard": reshard}
    rows = TWO if shape[0] == 1 else [[4, 4, 2, 1], [5, 3, 0, 0], [8, 0, 1, 1]]
    assert ranks(math.prod(shape)).run(compare, name, shape, rows, **options)[0] == []


class Normed(nn.Module):
    """Pairs of layers behind norms, whose scales all ranks of tp have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = value + layer(value)
        return value


class Scatters(TorchDispatchMode):
    """Counts the reduce-scatters over a group."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group, self.count = group, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scatters = func is torch.ops._c10d_functional.reduce_scatter_tensor.default
        self.count += scatters and str(args[-1]) == self.group
        return func(*args, **(kwargs or {}))


def positions_shared(reshard: str | None) -> tuple[int, list[float]]:
    """Return the reduce-scatters over tp of a step, and how far shards' gradients are off; a layer is frozen."""
    mesh, plain, model = mesh_of(1, 2, 1, 2), Normed().double(), Normed().double()
    x = torch.randn(6, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for each in (plain, model):
        each.layers[1].requires_grad_(False)
    how = {} if reshard is None else {"parallelize": "fsdp", "fsdp_reshard": reshard}
    pipe = autosplit(model, mesh=mesh, chunks=2, sample=x[:4], **how)
    rows = x.split([4, 2])[replica_of(mesh)]
    pipe.train_step(rows, target=rows, loss_fn=F.mse_loss)
    pipe.zero_grad()
    with Scatters(pipe._world.tensor.group_name) as scatters:
        pipe.train_step(rows, target=rows, loss_fn=F.mse_loss)
    F.mse_loss(plain(x), x).backward()
    off = [float(pipe.clip_grad_norm_(1.0) - torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))]
    for name, parameter in pipe.unsplit().named_parameters():
        right = plain.get_parameter(name).grad
        assert (parameter.grad is None) == (right is None) == name.startswith("layers.1")
        off += [] if right is None else [float((parameter.grad - right).abs().max())]
    return scatters.count, off


def test_ranks_of_tp_share_positions_as_without_shards(ranks: Pool) -> None:
    reports = [ranks(4).run(positions_shared, reshard) for reshard in (None, "never", "always")]
    counts = {count for each in reports for count, _ in each}
    assert len(counts) == 1
    assert min(counts) > 0
    assert max(abs(off) for each in reports for _, found in each for off in found) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_20_steps(ranks: Pool, name: str, shape: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if name == "grouped gpt" and dtype == torch.float32:
        reason = "losses as small as 0.005 are up to 1.9e-6 off; the plain model's own are 2.7e-6 off float64 there"
        request.applymarker(pytest.mark.xfail(reason=reason))
    rows = list(islice(cycle(rows_of(SHAPES[shape])), 20))
    assert ranks(4).run(compare, name, SHAPES[shape], rows, dtype=dtype)[0] == []
