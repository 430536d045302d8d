"""Traps of state: changes between calls, randomness, and what planning leaves behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.errors import TraceError
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import ROWS, WIDTH, Model, assert_equal_steps, numbers


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [False, True])
def test_a_hook_of_the_root_that_changes_the_output(when: str, step: bool) -> None:
    plain = Model(lambda m, x: m.b(m.a(x)))
    twin = copy.deepcopy(plain)
    pipe = autosplit(twin, devices=["cpu"] * 2, chunks=3)
    if when == "after":
        pipe(*ROWS.args)
    for model in (plain, twin):
        model.register_forward_hook(lambda _, i, o: o * 2)
    if step:
        assert_equal_steps(plain, pipe, ROWS, nn.MSELoss(), numbers(7, WIDTH, seed=1, gradient=False))
    else:
        assert_equal_runs(forward_backward(pipe, ROWS), forward_backward(plain, ROWS))


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_mixed_by_a_drawn_permutation(seed: int) -> None:
    torch.manual_seed(seed)
    model = Model(lambda m, x: x[torch.randperm(x.shape[0])] + m.a(x) * 0)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=3)
    value = torch.arange(12.0, dtype=torch.float64)[:, None].expand(12, WIDTH).contiguous()
    permutations = [[int(row) for row in pipe(value)[:, 0].round()] for _ in range(8)]
    assert all(sorted(permutation) == list(range(12)) for permutation in permutations)
    assert any(row >= 4 for permutation in permutations for row in permutation[:4]), "rows stay in their microbatch"


def test_a_seed_that_forward_sets_is_refused_or_kept() -> None:
    def body(model: Any, value: Tensor) -> Tensor:
        torch.manual_seed(5)
        return model.b(model.a(value)) + torch.rand(WIDTH, dtype=torch.float64)

    plain = Model(body)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for seed in (0, 1):
        batch = Batch((numbers(6, WIDTH, seed=seed, gradient=False),))
        try:
            mine = forward_backward(pipe, batch)
        except TraceError:
            return
        assert_equal_runs(mine, forward_backward(plain, batch))


def drawn(model: Any, value: Tensor) -> Tensor:
    return model.b(model.a(value)) + torch.rand(len(value), 1, generator=model.cache)


def test_a_generator_of_the_models_own_is_drawn_from_as_ever() -> None:
    plain, twin = (Model(drawn, cache=lambda: torch.Generator().manual_seed(1)) for _ in range(2))
    pipe = autosplit(twin, devices=["cpu"] * 2, chunks=3)
    for seed in range(3):
        batch = Batch((numbers(7, WIDTH, seed=seed),))
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert any("draws from a generator of its own" in note for note in pipe.plan.notes)
