"""Training under every schedule, a user's own too: the plain model's numbers, and the same bits inline and threaded."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.planning.request import ask
from tests.equivalence.equality import LANES, TOLERANCE, difference
from tests.pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WIDTH, ROWS, CHUNKS = 6, 9, 4
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "own")
AGAIN = ("always", "except_last", "block")
OWN = """
0F1,0F0,0F2,,,0I1,0I0,0W0,0F3,0W1,0B2,0I3,0W3
,1F1,1F0,1I1,1F2,1I0,1W0,1W1,1B2,1F3,1I3,1W3
"""
"""Forwards and input gradients out of order, input gradients of some microbatches apart and others whole."""


class Everything(nn.Module):
    """A skip over the whole model, a tied weight, dropout, and every kind of weight gradient that is put off or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i != 2) for i in range(5))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.back = nn.ConvTranspose1d(2, 1, 3, padding=1, bias=False)
        self.right = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.dropout = nn.Dropout(0.3)
        self.double()

    def forward(self, value: Tensor) -> Tensor:
        kept = value = torch.tanh(self.tied(self.layers[0](value)))
        value = self.dropout(torch.addmm(self.bias, value, self.right))
        for layer in self.layers[1:]:
            value = torch.tanh(layer(value))
        value = self.back(torch.relu(self.convolution(value[:, None])))[:, 0]
        return self.tied(self.norm(value + kept))


class Normalised(nn.Module):
    """A batch normalisation in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.double()

    def forward(self, value: Tensor) -> Tensor:
        value = self.norm(value)
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value


@functools.cache
def file_of(folder: Path) -> Path:
    path = folder / "own.csv"
    path.write_text(OWN.strip() + "\n", encoding="utf-8")
    return path


def split(model: nn.Module, name: str, lanes: str, folder: Path, recompute: str = "never") -> PipelinedModule:
    """Split a model over two lanes by estimated costs."""
    schedule: Any = file_of(folder) if name == "own" else name
    asked = ask(schedule, virtual_stages=1, devices=2, chunks=CHUNKS)
    options = Options(
        (torch.device("cpu"),) * 2,
        CHUNKS,
        schedule=asked.schedule,
        virtual_stages=asked.virtual_stages,
        actions=asked.actions,
        recompute=(recompute,),
        lanes=lanes,
        rng="plain",
        measure=False,
    )
    return PipelinedModule(model, options)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    value, target = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return value.requires_grad_(), target


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()} | {"input": value.grad}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def step(pipe: PipelinedModule, *, seed: int = 5) -> dict[str, Tensor]:
    """Run a training step and return its loss, gradients and buffers."""
    value, target = batch()
    pipe.zero_grad()
    torch.manual_seed(seed)
    loss = pipe.train_step(value, target=target, loss_fn=nn.MSELoss())
    return {"loss": loss} | gradients(pipe, value) | {n: b.clone() for n, b in pipe.named_buffers()}


def plain_step(model: nn.Module, *, seed: int = 5) -> dict[str, Tensor]:
    value, target = batch()
    model.zero_grad()
    torch.manual_seed(seed)
    loss = F.mse_loss(model(value), target)
    loss.backward()
    return {"loss": loss.detach()} | gradients(model, value)


def assert_plain(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    for name, expected in plain.items():
        assert difference(found[name], expected) <= TOLERANCE[torch.float64], name


def assert_same_bits(found: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(found) == list(other)
    for name, value in found.items():
        assert torch.equal(value, other[name]), f"other bits in {name}"


@functools.cache
def everything() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Everything()
    return model, plain_step(copy.deepcopy(model))


_GPIPE: list[dict[str, Tensor]] = []


def by_gpipe(folder: Path) -> dict[str, Tensor]:
    """Return what GPipe gives for the same model, found once."""
    if not _GPIPE:
        _GPIPE.append(step(split(copy.deepcopy(everything()[0]), "gpipe", "inline", folder)))
    return _GPIPE[0]


@in_turn(rest=False, name=list(SCHEDULES), lanes=LANES)
def test_every_schedule_is_the_plain_model(name: str, lanes: str, tmp_path: Path) -> None:
    model, plain = everything()
    pipe = split(copy.deepcopy(model), name, lanes, tmp_path)
    found = [step(pipe), step(pipe)]
    assert pipe.plan is not None
    assert len(pipe.plan.stages) == 2 * pipe.plan.virtual_stages
    value, target = batch()
    pipe.zero_grad()
    torch.manual_seed(5)
    F.mse_loss(pipe(value), target).backward()
    assert_plain({"loss": plain["loss"]} | gradients(pipe, value), plain)
    assert_plain(found[0], plain)
    for other in (*found[1:], by_gpipe(tmp_path)):
        assert_same_bits(found[0], other)


@in_turn(name=("zb_h1", "zb_v", "own"), again=list(AGAIN))
def test_what_runs_again_under_a_split_backward(name: str, again: str, tmp_path: Path) -> None:
    model, plain = everything()
    pipe = split(copy.deepcopy(model), name, "threads", tmp_path, again)
    found = step(pipe)
    assert_plain(found, plain)
    assert_same_bits(found, step(pipe))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "own"])
def test_batch_norm_counts_every_microbatch_once_under_every_schedule(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normalised()
    value, target = batch()
    twin, loss = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    for rows, goal in zip(value.tensor_split(CHUNKS), target.tensor_split(CHUNKS), strict=True):
        loss = loss + F.mse_loss(twin(rows), goal) * len(rows) / ROWS
    loss.backward()
    plain = {"loss": loss.detach()} | gradients(twin, value)
    found = step(split(copy.deepcopy(model), name, "threads", tmp_path))
    assert_plain(found, plain)
    first = copy.deepcopy(model)
    first(value)
    assert_plain(found, {name: b for name, b in first.named_buffers() if b.is_floating_point()})
