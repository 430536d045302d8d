"""Noise that groups of rows share: what ``torch.multinomial`` draws for all rows, and the random state behind it."""

from __future__ import annotations

import threading

import pytest
import torch

from autosplit.generation.noise import AHEAD, GroupMode, SharedNoise


@pytest.mark.parametrize("samples", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_noise_draws_what_multinomial_draws(dtype: torch.dtype, samples: int) -> None:
    sizes, repeats = (3, 1, 2), 2
    steps = [torch.randn(12, 333).mul(4).to(dtype).softmax(-1) for _ in range(3)]
    torch.manual_seed(5)
    expected, state = [torch.multinomial(probs, samples) for probs in steps], torch.get_rng_state()
    torch.manual_seed(5)
    noise = SharedNoise(sizes)
    drawn = []
    for group in range(3):
        with GroupMode(noise, group):
            drawn.append([torch.multinomial(probs.split([6, 2, 4])[group], samples) for probs in steps])
        noise.end(group)
    noise.settle()
    assert repeats * sum(sizes) == 12
    assert all(
        torch.equal(torch.cat(step), right) for step, right in zip(zip(*drawn, strict=True), expected, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_probabilities_that_are_none_are_refused_as_by_multinomial() -> None:
    with GroupMode(SharedNoise([2, 2]), 0):
        for wrong in (torch.zeros(2, 5), torch.full((2, 5), torch.nan), -torch.ones(2, 5)):
            with pytest.raises(RuntimeError, match="prob"):
                torch.multinomial(wrong, 1)


def test_a_group_waits_when_it_is_far_ahead() -> None:
    noise, probs, done = SharedNoise([1, 1]), torch.ones(1, 5), []

    def draw() -> None:
        with GroupMode(noise, 0):
            for step in range(AHEAD + 2):
                torch.multinomial(probs, 1)
                done.append(step)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert len(done) == AHEAD
    with GroupMode(noise, 1):
        torch.multinomial(probs, 1)
    noise.end(1)
    thread.join()
    assert len(done) == AHEAD + 2
