"""One microbatch tells what two do: the first backward is that of a later one without what is added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.memory.events import StageTrace, Step
from autosplit.options import Sample
from autosplit.profile import stage_trace
from autosplit.profile.quick_fake import QuickFake
from autosplit.profile.stage_graph import StageGraph, stage_graph
from autosplit.profile.stage_trace import How, trace_stage
from autosplit.trace.ladder import trace

WIDTH, LENGTH = 160, 110
"""Weights and values are large, biases and scales are small."""


class Block(nn.Module):
    """Gradients of all kinds: of products, views, sums, slices, and of a leaf that shares its own with another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, False)
        self.scale, self.turn = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.places, self.table = (nn.Parameter(torch.ones(LENGTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale @ self.turn
        return x + self.places + self.table[:1]


class Shared(nn.Module):
    """One gradient arrives at two leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(LENGTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.one + self.other)).tanh()


class Twice(nn.Module):
    """Two gradients arrive at a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def stage_of(model: nn.Module, given: Tensor) -> StageGraph:
    return stage_graph(trace(model, Sample(given)).graph)


def told(found: StageTrace) -> Any:
    """What a trace tells, with its storages numbered as they come."""
    numbers: dict[int, int] = {}
    passes = found.forward, found.backward, found.backward_later
    met = {storage for steps in passes for step in steps for storage, _ in step.changes}

    def numbered(storages: Any) -> tuple[int, ...]:
        return tuple(numbers.setdefault(storage, len(numbers)) for storage in storages)

    def steps(own: tuple[Step, ...]) -> list[Any]:
        return [(step.node, [(*numbered((storage,)), count) for storage, count in step.changes]) for step in own]

    split = {
        name: (numbered(s for s in held.saved if s in met), held.cotangent_bytes, numbered(held.gradients))
        for name, held in found.split.items()
    }
    names = [(numbered(held), list(held.values())) for held in (found.gradients, found.kept)]
    return [*map(steps, passes), names, split, found.guessed_bytes]


def both(stage: StageGraph, how: How) -> tuple[StageTrace | None, StageTrace | None]:
    quick = QuickFake()
    one, two = (stage_trace._traced(stage, how, quick, once=once) for once in (True, False))
    return one, two


WAYS: dict[str, dict[str, Any]] = {"never": {}, "always": {"whole": True}, "block": {"units": ("1", "2")}}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_one_microbatch_tells_what_two_do(way: str, kernels: Any) -> None:
    words = nn.Embedding(1000, WIDTH)
    model = nn.Sequential(words, Block(), Block(), nn.Conv1d(LENGTH, LENGTH, 3, padding=1))
    stage = stage_of(model, torch.zeros(1, LENGTH, dtype=torch.long))
    one, two = both(stage, How(1, apart=True, kernels=kernels, **WAYS[way]))
    assert one is not None
    assert two is not None
    assert told(one) == told(two)
    assert told(one)[1] != told(one)[2], "sums that are there make a difference"


@pytest.mark.parametrize("model", [Twice, Shared])
def test_where_somebody_else_has_a_gradient_two_microbatches_run(model: type[nn.Module]) -> None:
    stage = stage_of(model(), torch.zeros(1, LENGTH, WIDTH))
    how = How(1, apart=True)
    one, two = both(stage, how)
    assert one is None
    assert two is not None
    assert told(trace_stage(stage, how)) == told(two)


def test_under_autocast_two_microbatches_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds what the first cast."""
    stage = stage_of(nn.Sequential(Block(), Block()), torch.zeros(1, LENGTH, WIDTH))
    ran: list[bool] = []
    traced = stage_trace._traced

    def noted(*args: Any, once: bool) -> StageTrace | None:
        ran.append(once)
        return traced(*args, once=once)

    monkeypatch.setattr(stage_trace, "_traced", noted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace_stage(stage, How(1, apart=True))
    assert ran == [False]
    trace_stage(stage, How(1, apart=True))
    assert ran == [False, True]


class Alternating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Calls(nn.Module):
    """The user's own Python runs each time."""

    def forward(self, x: Tensor) -> Tensor:
        applied: Tensor = Alternating.apply(x)
        return applied.tanh()


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("made", "once"), [(Calls, False), (Hooked, False), (Block, True)])
def test_where_the_users_own_python_runs_two_microbatches_are_asked(
    made: type[nn.Module], once: bool, precision: torch.dtype
) -> None:
    class Under(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=precision is not torch.float32):
                return self.inner(x)

    assert stage_trace._repeats(stage_of(Under(), torch.zeros(4, LENGTH, WIDTH)), How(4, apart=True)) == once
