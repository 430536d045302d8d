"""What ranks compute where messages go as NCCL brings them: without tags, by rendezvous, in groups of two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed.join import join
from tests.distributed import rendezvous
from tests.distributed.processes import Pool, Ranks
from tests.pairwise import in_turn

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved", "looped_bfs", "zb_v")
WIDTH, ROWS = 8, 24


class Chain(nn.Module):
    """Eight layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(8))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value


class Skip(Chain):
    """The first layer's values are added to the last one's, and the third one's to the sixth one's."""

    def forward(self, value: Tensor) -> Tensor:
        values = [value]
        for place, layer in enumerate(self.layers):
            value = torch.tanh(layer(value))
            values.append(value if place != 5 else value + values[3])
        return value + values[1]


class Tie(Chain):
    """Layers far apart have one weight, and a scale made of a parameter is used by all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7].weight, self.layers[4].weight = self.layers[0].weight, self.layers[1].weight
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        scale = self.scale.square() + 1
        for layer in self.layers:
            value = torch.tanh(layer(value)) * scale
        return value


class Mixes(Tie):
    """What comes behind the layers needs all rows at once, and a parameter of the first stage."""

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        return (value - value.mean(0)) * self.scale.square()


MODELS = (Skip, Tie, Chain)


def worst_difference(make: Callable[[], nn.Module], options: dict[str, Any], mesh: tuple[int, int] = (1, 0)) -> float:
    """Take three steps; return the largest difference of a gradient from the plain model's; called in every process.

    ``mesh``: how many replicas there are, and how many ranks each has; 0: all are one pipeline.
    """
    if mesh[1]:
        options = {**options, "mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "pp"))}
    else:
        options = {**options, "devices": "torchrun"}
    model = make()
    plain = copy.deepcopy(model)
    data = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    share, replica = ROWS // mesh[0], join(options.get("mesh")).replica
    rows = slice(share * replica, share * (replica + 1))
    pipe = autosplit(model, chunks=6, sample=data[0][rows], **options)
    differences = [0.0]
    for _ in range(3):
        plain.zero_grad()
        pipe.zero_grad()
        F.mse_loss(plain(data[0]), data[1]).backward()
        pipe.train_step(data[0][rows], target=data[1][rows], loss_fn=F.mse_loss)
        expected = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            gradient, other = parameter.grad, expected[name].grad
            assert gradient is not None
            assert other is not None
            differences.append((gradient - other).abs().max().item())
    return max(differences)


def far_off(cases: Sequence[tuple[str, type[nn.Module]]]) -> list[str]:
    """Return the schedules and models whose gradients are not the plain model's; called in every process."""
    worst = {(schedule, model): worst_difference(model, {"schedule": schedule}) for schedule, model in cases}
    return [f"{schedule} {model.__name__}: {worst}" for (schedule, model), worst in worst.items() if not worst < 1e-12]


@pytest.mark.quick
def test_every_schedule_has_the_gradients_of_the_plain_model(nccl_ranks: Pool) -> None:
    cases = list(zip(SCHEDULES, cycle(MODELS), strict=False))
    assert nccl_ranks(2).run(far_off, cases) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_schedule_and_model_has_the_gradients_of_the_plain_model(nccl_ranks: Pool, size: int) -> None:
    assert nccl_ranks(size).run(far_off, list(product(SCHEDULES, MODELS))) == [[]] * size


@in_turn(schedule=("1f1b", "interleaved"), size=(2, 3))
def test_a_model_that_mixes_rows(nccl_ranks: Pool, schedule: str, size: int) -> None:
    assert max(nccl_ranks(size).run(worst_difference, Mixes, {"schedule": schedule})) < 1e-12


def calls() -> float:
    """Go backward from the pipe's outputs, twice; return the largest difference from the plain model's gradients."""
    model = Mixes()
    plain, value = copy.deepcopy(model), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    pipe = autosplit(model, devices="torchrun", chunks=6, sample=value, schedule="zb_v", outputs="all")
    for each in (plain, pipe, plain, pipe):
        each(value).square().sum().backward()
    expected = dict(plain.named_parameters())
    pairs = [(parameter.grad, expected[name].grad) for name, parameter in pipe.named_parameters()]
    return max(float((own - other).abs().max()) for own, other in pairs)


def test_calls_whose_backward_the_caller_runs(nccl_ranks: Pool) -> None:
    assert max(nccl_ranks(2).run(calls)) < 1e-12


@pytest.mark.slow
def test_replicas_of_a_stage(nccl_ranks: Pool) -> None:
    options = {"schedule": "1f1b", "replicas": [1, 2]}
    assert max(nccl_ranks(3).run(worst_difference, Skip, options)) < 1e-12


def both_send_first() -> str:
    """Send to the other rank before either receives; return what is said of it."""
    rendezvous.install(0.5)
    world, value = join(), torch.zeros(4)
    try:
        world.isend(value, 1 - dist.get_rank()).wait()
    except RuntimeError as error:
        return str(error)
    return "sent"


def test_two_ranks_that_both_send_first_wait_for_each_other() -> None:
    ranks = Ranks(2)
    try:
        assert all("Timed out" in text or "gloo" in text.lower() for text in ranks.run(both_send_first))
    finally:
        ranks.close()
