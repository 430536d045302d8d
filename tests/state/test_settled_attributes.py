"""Attributes that a model's calls set for good, once or time and again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit, plan
from autosplit.pipelined import PipelinedModule


class Window(nn.Module):
    """Rolls and mixes windows; one that is larger than the input is clamped, for good, as Swin's are."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.shift = 7, 3
        self.mix = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= self.size:
            self.shift, self.size = 0, x.shape[1]
        rolled = torch.roll(x, -self.shift, 1) if self.shift else x
        return x + torch.tanh(self.mix(rolled)) / self.size


class Windows(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Window() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def windows(blocks: int = 3) -> Windows:
    torch.manual_seed(0)
    return Windows(blocks)


def attributes(model: nn.Module) -> list[Any]:
    return [(block.size, block.shift) for block in model.blocks]  # type: ignore[union-attr, operator]


def batches(*widths: int) -> list[torch.Tensor]:
    return [torch.randn(8, width, 6, generator=torch.Generator().manual_seed(width)) for width in widths]


def split(model: nn.Module, **options: Any) -> PipelinedModule:
    return autosplit(model, devices=["cpu"] * 2, chunks=4, **options)


@pytest.mark.parametrize("widths", [(5, 5, 5), (5, 9, 5), (9, 5, 9), (9, 9, 4, 12)])
def test_a_pipe_remembers_what_the_model_would(widths: tuple[int, ...]) -> None:
    plain = windows()
    model = copy.deepcopy(plain)
    pipe = split(model)
    for x in batches(*widths):
        expected, got = plain(x), pipe(x)
        assert torch.equal(expected, got)
        assert attributes(model) == attributes(plain)
        expected.square().mean().backward()
        got.square().mean().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert pipe._core.recordings.tree is None, "a graph follows it"


def test_planning_sets_nothing_and_steps_do() -> None:
    model = windows()
    before = attributes(model)
    (x,) = batches(5)
    pipe = split(model, sample=x)
    assert attributes(model) == before
    assert "forward changes the Python attribute 'shift' of module 'blocks.0', and 5 more" in pipe.report()
    for _ in range(2):
        pipe.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
        assert attributes(model) == [(5, 0)] * 3
    assert pipe._core.recordings.made == 1, "the second step runs what the first one did"
    torch.testing.assert_close(pipe(x[:3]), copy.deepcopy(model)(x[:3]))
    assert pipe._core.recordings.made == 1, "and so does a smaller batch"


def test_a_model_that_is_set_back_starts_again() -> None:
    plain = windows()
    model = copy.deepcopy(plain)
    pipe = split(model)
    for x in batches(5, 9):
        for each in (plain, model):
            for block in each.blocks:
                block.size, block.shift = 7, 3  # type: ignore[assignment]
        assert torch.equal(plain(x), pipe(x))
        assert attributes(model) == attributes(plain)


@pytest.mark.parametrize("blocks", [3, 10])
def test_a_plan_of_a_model_without_values_takes_it_too(blocks: int) -> None:
    with torch.device("meta"):
        model = Windows(blocks)
        sample = torch.empty(8, 5, 6)
    model.blocks[-1].size = 5  # the last one is another kind of block
    before = attributes(model)
    found = plan(model, "2xL4-24GB", sample=sample, loss_fn=lambda y: y.sum())
    assert attributes(model) == before
    assert any(note.startswith("forward changes the Python attribute 'shift' of") for note in found.notes)
    assert {node.split("#")[0] for stage in found.stages for node in stage.nodes} >= {
        f"blocks.{number}.mix" for number in range(blocks)
    }


class MostRows(nn.Module):
    """Keeps the largest batch that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.most = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, x.shape[0])
        return torch.tanh(self.mix(x)) if self.training else torch.tanh(self.mix(x)) / self.most


def test_what_a_larger_batch_alone_would_change_is_changed_by_it() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), MostRows(), nn.Linear(6, 6))
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4)
    for training, rows in ((False, 10), (True, 10), (True, 33), (False, 5)):
        x = torch.randn(rows, 4, 6)
        torch.testing.assert_close(pipe.train(training)(x), plain.train(training)(x))
        assert pipe[1].most == plain[1].most  # type: ignore[union-attr]
