"""The same calls on the plain model and on a pipe, and what they give side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from autosplit import autosplit
from tests.equivalence.equality import LANES, difference
from tests.models.named import CASES, WIDTH, numbers
from tests.pairwise import mostly_slow

Run = Callable[[nn.Module], Sequence[Any]]
both = pytest.mark.parametrize("lanes", mostly_slow(LANES, "threads"))
"""Both kinds of lanes, of which a default run takes threads."""


def pair(name: str, lanes: str, *, chunks: int = 4) -> tuple[nn.Module, Any]:
    case = CASES[name]
    return case.build(), autosplit(case.build(), devices=["cpu"] * 3, chunks=chunks, lanes=lanes)


def assert_equal(actual: Sequence[Any], expected: Sequence[Any], *, tolerance: float = 1e-12) -> None:
    assert len(actual) == len(expected)
    for position, (mine, plain) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(plain, Tensor):
            assert isinstance(mine, Tensor), position
            distance = difference(mine.detach(), plain.detach())
            assert mine.shape == plain.shape, position
            assert distance <= tolerance, f"{position}: {distance:.2e}"
        else:
            assert mine == plain, position


def check(run: Run, name: str, lanes: str, *, chunks: int = 4, tolerance: float = 1e-12) -> None:
    """Assert that ``run`` gives for the pipe what it gives for the plain model."""
    plain, pipe = pair(name, lanes, chunks=chunks)
    assert_equal(run(pipe), run(plain), tolerance=tolerance)


def as_plain(name: str, *, tolerance: float = 1e-12) -> Callable[[Run], Callable[[str], None]]:
    """Make a test of a run: on both kinds of lanes a pipe gives what the plain model gives."""

    def made(run: Run) -> Callable[[str], None]:
        @both
        def test(lanes: str) -> None:
            check(run, name, lanes, tolerance=tolerance)

        return test

    return made


def value_of(rows: int = 9, *, seed: int = 0, gradient: bool = True) -> Tensor:
    return numbers(rows, WIDTH, seed=seed, gradient=gradient)


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]
