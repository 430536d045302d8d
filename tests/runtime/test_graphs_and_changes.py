"""graphs=True: what changes between a call and its backward is an error, or has no effect, as without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.runtime import batch_norm, graph_slot
from tests.runtime.graph_pipes import Pair

WIDTH, ROWS = 4, 6


def pair(model: nn.Module, **options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(model, torch.zeros(ROWS, WIDTH), **options)


class Frozen(nn.Module):
    """A frozen weight and a buffer that its backward reads, and a frozen bias that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.held, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.held.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return self.last(torch.tanh(self.held(torch.tanh(self.first(value)))) * self.scale)


@pytest.mark.parametrize("changed", ["held.weight", "scale", "held.bias", "last.bias"])
def test_what_a_backward_reads_of_frozen_tensors_may_not_change_before_it(changed: str) -> None:
    two = pair(Frozen())
    for _ in range(3):
        two.call(torch.randn(ROWS, WIDTH), grad_of_input=False)

    def run(pipe: Any, model: nn.Module) -> list[Any]:
        model.zero_grad(set_to_none=True)
        output = pipe(torch.ones(ROWS, WIDTH))
        with torch.no_grad():
            model.get_parameter(changed).mul_(2) if "." in changed else model.get_buffer(changed).mul_(2)
        output.sum().backward()
        return [output.detach()]

    if changed.endswith(".bias"):  # no backward reads it
        two.both(run)
        assert two.replays
        return
    for pipe, model, text in zip(two.pipes, two.models, ("frozen parameter or buffer of stage", ""), strict=True):
        with pytest.raises(RuntimeError, match=f"{text}.*inplace operation"):
            run(pipe, model)


def test_gradients_of_graphs_that_were_dropped_meanwhile_are_nobody_elses_memory() -> None:
    two = pair(Frozen())
    for _ in range(3):
        two.call(torch.randn(ROWS, WIDTH), grad_of_input=False)
    values = torch.randn(2, ROWS, WIDTH)

    def run(pipe: Any, model: nn.Module) -> list[Any]:
        output, weight = pipe(values[0]), model.first.weight
        weight.data = weight.detach().clone()
        pipe(values[1])
        (one,) = torch.autograd.grad(output.sum(), weight, retain_graph=True)
        before = one.clone()
        (other,) = torch.autograd.grad(output.square().sum(), weight)
        return [before, one, other]

    [[before, after, *_], *_] = two.both(run)[0]
    assert torch.equal(before, after)


class Blocks(nn.Module):
    """Blocks, one of them with a norm that counts, and behind them a buffer that the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.blocks[5].append(nn.BatchNorm1d(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return self.last(value * self.scale)


def change(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def test_a_buffer_outside_of_blocks_that_run_again_may_not_change_before_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The statistics of a norm, which change when the forwards are over, are no such buffer."""
    monkeypatch.setattr(batch_norm, "_rounded", lambda *given: None)  # which on the CPU looks at numbers
    two = pair(Blocks(), recompute="block")
    for _ in range(3):
        two.call(torch.randn(ROWS, WIDTH), grad_of_input=False)
    assert all("as graphs" in line and "not all" not in line for line in two.lines()), two.lines()
    for pipe, model in zip(two.pipes, two.models, strict=True):
        output = pipe(torch.ones(ROWS, WIDTH))
        change(model.get_buffer("scale"))
        with pytest.raises(RuntimeError, match="inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("changed", ["last.weight", "held.weight", "scale"])
def test_what_a_backward_of_a_training_step_reads_may_not_change_before_it(changed: str) -> None:
    two = pair(Frozen(), stages=1)
    for _ in range(3):
        two.train(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    assert two.replays
    for pipe, model in zip(two.pipes, two.models, strict=True):
        state = model.state_dict(keep_vars=True)

        def loss_fn(output: Tensor, target: Tensor, tensor: Tensor = state[changed]) -> Tensor:
            change(tensor)
            return (output - target).square().mean()

        with pytest.raises(RuntimeError, match="inplace operation"):
            pipe.train_step(torch.ones(ROWS, WIDTH), target=torch.ones(ROWS, WIDTH), loss_fn=loss_fn)


def test_a_cell_runs_again_for_its_backward_only_on_what_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd saved nothing of is read as well when the whole forward runs again."""
    two = pair(Frozen())
    for _ in range(2):
        two.both(lambda pipe, model: [pipe(torch.ones(ROWS, WIDTH)).detach()])

    def fails(*given: Any, **named: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph_slot.Back, "__init__", fails)
    output = two.pipes[0](torch.ones(ROWS, WIDTH))
    assert two.replays
    change(two.models[0].get_parameter("held.bias"))
    with pytest.raises(RuntimeError, match=r"frozen parameter or buffer of stage.*inplace operation"):
        output.sum().backward()


class Counted(Blocks):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1
        return super().forward(value)


def test_what_a_stage_writes_itself_may_change_before_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "_rounded", lambda *given: None)
    two = pair(Counted(), recompute="block")

    def run(pipe: Any, model: nn.Module) -> list[Any]:
        model.zero_grad(set_to_none=True)
        first, second = (pipe(torch.full((ROWS, WIDTH), value)) for value in (1.0, 2.0))
        first.sum().backward()
        second.square().sum().backward()
        return [first.detach(), second.detach()]

    for _ in range(3):
        two.both(run)
    assert two.replays
    assert any("in flight" in line for line in two.lines()), "cells as they are, which write to the model's own"
