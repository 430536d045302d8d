"""Several threads that call pipes at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit

WIDTH, CALLERS = 6, 4
VALUE = torch.linspace(-1, 1, 7 * WIDTH, dtype=torch.float64).reshape(7, WIDTH)


def model(seed: int, layers: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))).double()


def together(function: Any) -> list[Any]:
    """Return what a function gives for each caller's number, all callers at the same time."""
    with ThreadPoolExecutor(CALLERS) as callers:
        return list(callers.map(function, range(CALLERS)))


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_models_are_recorded_by_several_callers_at_once(lanes: str) -> None:
    models = [model(number, layers=2 + number) for number in range(CALLERS)]
    pipes = [autosplit(own, devices=["cpu"] * 2, chunks=3, lanes=lanes) for own in models]
    outputs = together(lambda number: pipes[number](VALUE))
    for own, output in zip(models, outputs, strict=True):
        torch.testing.assert_close(output, own(VALUE), rtol=1e-12, atol=1e-12)


def test_a_plain_model_runs_while_another_is_recorded() -> None:
    other, expected = model(9), model(9)(VALUE)

    def call(number: int) -> Tensor:
        if number % 2:
            return autosplit(model(number), devices=["cpu"] * 2, chunks=3)(VALUE)
        outputs = [other(VALUE) for _ in range(200)]
        assert all(torch.equal(output, expected) for output in outputs)
        return expected

    together(call)


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_a_target_that_was_computed_with_gradients(lanes: str) -> None:
    def gradients(student: nn.Module, teacher: nn.Module) -> list[Tensor | None]:
        target = teacher(VALUE)
        if hasattr(student, "train_step"):
            student.train_step(VALUE, target=target, loss_fn=nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(student(VALUE), target).backward()
        return [p.grad for p in (*student.parameters(), *teacher.parameters())]

    pipe = autosplit(model(0), devices=["cpu"] * 2, chunks=3, lanes=lanes, sample=VALUE)
    torch.testing.assert_close(gradients(pipe, model(1)), gradients(model(0), model(1)), rtol=1e-10, atol=1e-12)
