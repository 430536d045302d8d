"""Training under every schedule, a user's own too: the plain model's numbers, and the same bits inline and threaded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.planning.request import ask
from tests.equivalence.equality import (
    LANES,
    Batch,
    Run,
    assert_equal_runs,
    assert_same_bits,
    collect,
    forward_backward,
    train_step,
)
from tests.equivalence.side_by_side import assert_equal
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


class InPlace(nn.Module):
    """Operations in place on what may have crossed a cut: a skip, a view of it, an input, and in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.act = nn.ReLU(inplace=True)

    def forward(self, value: Tensor) -> Tensor:
        near = self.first(value)
        far = self.second(near.tanh())
        near.add_(1.0)
        far.view(far.shape[0], 2, -1)[:, 0].mul_(0.5)
        far = F.dropout(self.act(self.third(self.act(far))), 0.0, self.training, inplace=True)
        near += far
        return self.last(near).sigmoid_()


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


def batch(dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    generator = torch.Generator().manual_seed(3)
    value, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    return Batch((value.requires_grad_(),)), target.detach()


def step(pipe: PipelinedModule, dtype: torch.dtype = torch.float64) -> Run:
    given, target = batch(dtype)
    torch.manual_seed(5)
    return train_step(pipe, given, target=target, loss_fn=nn.MSELoss())


def call(model: nn.Module, dtype: torch.dtype = torch.float64) -> Run:
    given, target = batch(dtype)
    torch.manual_seed(5)
    return forward_backward(model, given, loss=lambda output: F.mse_loss(output, target))


MAKE: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    # operations in place hold values together, so that one of these has two parts that can be separated
    "in place": lambda: nn.Sequential(InPlace(), InPlace()).double(),
}


@functools.cache
def plain(kind: str) -> tuple[nn.Module, Run, Run]:
    """Return a model, what a call of it gives, and a step."""
    torch.manual_seed(0)
    model = MAKE[kind]()
    found = call(copy.deepcopy(model))
    return model, found, Run({}, found.loss, found.gradients, found.buffers)


@functools.cache
def by_gpipe(kind: str) -> Run:
    return step(split(copy.deepcopy(plain(kind)[0]), "gpipe", "inline", Path()))


def check(kind: str, name: str, lanes: str, folder: Path) -> None:
    model, called, stepped = plain(kind)
    pipe = split(copy.deepcopy(model), name, lanes, folder)
    found = [step(pipe), step(pipe)]
    assert pipe.plan is not None
    assert len(pipe.plan.stages) == 2 * pipe.plan.virtual_stages
    assert_equal_runs(call(pipe), called)
    assert_equal_runs(found[0], stepped)
    for other in (*found[1:], by_gpipe(kind)):
        assert_same_bits(found[0], other)


@in_turn(rest=False, name=list(SCHEDULES), lanes=LANES)
def test_every_schedule_is_the_plain_model(name: str, lanes: str, tmp_path: Path) -> None:
    check("everything", name, lanes, tmp_path)


@in_turn(share=(0, 3), rest=False, name=list(SCHEDULES), lanes=LANES)
def test_operations_in_place_at_cuts(name: str, lanes: str, tmp_path: Path) -> None:
    check("in place", name, lanes, tmp_path)


@pytest.mark.parametrize(
    ("lanes", "name", "precision"),
    [
        ("inline", "1f1b", torch.bfloat16),
        ("threads", "zb_h1", torch.bfloat16),
        ("threads", "zb_v", torch.float16),
        ("threads", "gpipe", torch.float16),
    ],
)
def test_steps_under_autocast(precision: torch.dtype, lanes: str, name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(plain("in place")[0]).float()
    pipe = split(copy.deepcopy(model), name, lanes, tmp_path)
    with torch.autocast("cpu", dtype=precision):
        mine, other = step(pipe, torch.float32), call(model, torch.float32)
    assert mine.loss.dtype == other.loss.dtype
    assert_equal([mine.loss, *mine.gradients.values()], [other.loss, *other.gradients.values()], tolerance=3e-2)
    assert not torch.is_autocast_enabled("cpu")


@in_turn(name=("zb_h1", "zb_v", "own"), again=list(AGAIN))
def test_what_runs_again_under_a_split_backward(name: str, again: str, tmp_path: Path) -> None:
    model, _, stepped = plain("everything")
    pipe = split(copy.deepcopy(model), name, "threads", tmp_path, again)
    found = step(pipe)
    assert_equal_runs(found, stepped)
    assert_same_bits(found, step(pipe))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "own"])
def test_batch_norm_counts_every_microbatch_once_under_every_schedule(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model, (given, target) = nn.Sequential(nn.BatchNorm1d(WIDTH), *layers).double(), batch()
    twin, inputs, loss = copy.deepcopy(model), given.fresh(), torch.zeros((), dtype=torch.float64)
    for rows, goal in zip(inputs.args[0].tensor_split(CHUNKS), target.tensor_split(CHUNKS), strict=True):
        loss = loss + F.mse_loss(twin(rows), goal) * len(rows) / ROWS
    loss.backward()
    found, first = step(split(copy.deepcopy(model), name, "threads", tmp_path)), copy.deepcopy(model)
    first(given.args[0])
    assert_equal_runs(found, replace(collect(twin, inputs, output=(), loss=loss), buffers=dict(first.named_buffers())))
