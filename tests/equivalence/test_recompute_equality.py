"""Whatever runs again in the backward, outputs, gradients and buffers are the same bits as when nothing does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from tests.equivalence.equality import LANES, Batch, Run, assert_same_bits, forward_backward, train_step
from tests.models.named import numbers
from tests.pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WIDTH, WORDS, ROWS, STAGES, CHUNKS = 6, 13, 10, 3, 4
OPTIONS = {
    "always": ("always",),
    "except_last": ("except_last",),
    "block": ("block",),
    "mixed": ("block", "never", "always"),
}


class Block(nn.Module):
    """Batch norm, an in-place change, dropout, and a skip from the model's beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, value: Tensor, first: Tensor) -> Tensor:
        inside = torch.tanh_(self.wide(self.norm(value)))
        return value + self.drop(self.narrow(inside)) + F.dropout(first, 0.2, self.training)


class Net(nn.Module):
    """Tied at both ends; with ``mixes`` an output that mixes rows too."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.mixes = mixes

    def forward(self, words: Tensor) -> Any:
        first = value = self.table(words).mean(1)
        for block in self.blocks:
            value = block(value, first)
        found = self.head(value)
        return (found, found - found.mean(0)) if self.mixes else found


def words() -> Batch:
    return Batch((torch.randint(WORDS, (ROWS, 3), generator=torch.Generator().manual_seed(1)),))


def split(
    make: Callable[[], nn.Module],
    *,
    lanes: str = "inline",
    recompute: tuple[str, ...] = ("never",),
    schedule: str = "1f1b",
) -> PipelinedModule:
    """Split by estimated costs, so that the cut is the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().double()
    devices = (torch.device("cpu"),) * STAGES
    options = Options(devices, CHUNKS, schedule=schedule, lanes=lanes, recompute=recompute, measure=False)
    return PipelinedModule(model, options)


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def runs(pipe: PipelinedModule, batch: Batch) -> list[Run]:
    """Return a call with its backward and a step, one after the other from one seed."""
    target = numbers(ROWS, WORDS, seed=2).detach()
    torch.manual_seed(11)
    call = forward_backward(pipe, batch)
    step = train_step(
        pipe, batch, target=target, loss_fn=lambda out, want: F.mse_loss(first_of(out), want), loss_reduction="mean"
    )
    return [call, step]


@functools.cache
def expected(name: str, lanes: str) -> list[Run]:
    return runs(split(MODELS[name], lanes=lanes), words())


MODELS: dict[str, Callable[[], nn.Module]] = {"net": Net, "mixing": functools.partial(Net, mixes=True)}


@in_turn(option=list(OPTIONS), lanes=LANES, schedule=("1f1b", "gpipe"))
def test_the_same_bits(option: str, lanes: str, schedule: str) -> None:
    pipe = split(Net, lanes=lanes, recompute=OPTIONS[option], schedule=schedule)
    found = runs(pipe, words())
    assert pipe.plan is not None
    assert {stage.recompute for stage in pipe.plan.stages} == set(OPTIONS[option])
    for one, other in zip(found, expected("net", lanes), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("option", ["always", "block"])
def test_the_same_bits_where_an_output_mixes_rows(option: str) -> None:
    pipe = split(MODELS["mixing"], lanes="threads", recompute=OPTIONS[option])
    for one, other in zip(runs(pipe, words()), expected("mixing", "threads"), strict=True):
        assert_same_bits(one, other)


@in_turn(option=("always", "block"), lanes=LANES)
def test_under_autocast_the_casts_are_the_same_again(option: str, lanes: str) -> None:
    def run(recompute: tuple[str, ...]) -> list[Tensor]:
        pipe = split(Net, lanes=lanes, recompute=recompute)
        pipe.float()
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = pipe(*words().args)
        output.float().pow(2).sum().backward()
        return [output.detach(), *(p.grad for p in pipe.parameters() if p.grad is not None)]

    never, again = run(("never",)), run(OPTIONS[option])
    assert never[0].dtype is torch.bfloat16
    for one, other in zip(never, again, strict=True):
        assert torch.equal(one, other)


@in_turn(option=("always", "block"), lanes=LANES)
def test_backwards_of_backwards_and_several_of_one_graph(option: str, lanes: str) -> None:
    found = []
    for recompute in (("never",), OPTIONS[option]):
        pipe = split(functools.partial(nn.Sequential, *smooth()), lanes=lanes, recompute=recompute)
        value = numbers(ROWS, WIDTH, seed=1, gradient=True)
        loss = pipe(value).pow(2).sum()
        first = torch.autograd.grad(loss, value, retain_graph=True)[0]
        again = torch.autograd.grad(loss, value, create_graph=True)[0]
        again.pow(2).sum().backward()
        found.append([first, again.detach(), *(p.grad for p in pipe.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def smooth() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]


@pytest.mark.parametrize("option", ["always", "block"])
def test_a_table_that_the_forward_renormalises(option: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(WORDS, WIDTH, max_norm=0.5), nn.Flatten(), nn.Linear(3 * WIDTH, WIDTH)).double()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=CHUNKS, recompute=option)
    optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (plain, pipe)]
    for seed in range(3):
        words, target = torch.arange(3 * ROWS).reshape(ROWS, 3) % WORDS, numbers(ROWS, WIDTH, seed=seed)
        F.mse_loss(plain(words), target).backward()
        pipe.train_step(words, target=target, loss_fn=F.mse_loss)
        torch.testing.assert_close(pipe.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
