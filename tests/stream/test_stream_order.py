"""Which version of its weights each stage uses for each minibatch: PipeDream's figure cell by cell, and a run of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.stream import STALENESS, stream_actions, versions_held, weight_version
from tests.stream import reference
from tests.stream.streams import CPU

FIGURE = """
worker 1 | F1.1 F2.1 F3.1 F4.1 .    .    .    B1.1 F5.2 B2.1 F6.3 B3.1 F7.4 B4.1 F8.5 B5.2 .    B6.3 .    B7.4 .    B8.5
worker 2 | .    F1.1 F2.1 F3.1 .    .    B1.1 F4.2 B2.1 F5.3 B3.1 F6.4 B4.2 F7.5 B5.3 F8.6 B6.4 .    B7.5 .    B8.6
worker 3 | .    .    F1.1 F2.1 .    B1.1 F3.2 B2.1 F4.3 B3.2 F5.4 B4.3 F6.5 B5.4 F7.6 B6.5 F8.7 B7.6 .    B8.7
worker 4 | .    .    .    F1.1 B1.1 F2.2 B2.2 F3.3 B3.3 F4.4 B4.4 F5.5 B5.5 F6.6 B6.6 F7.7 B7.7 F8.8 B8.8
"""
"""1F1B without a flush on four workers, a column per tick, counted from 1: F5.2 is the forward of minibatch 5 with the
version that the first update has made."""


def lanes(stages: int, staleness: str, minibatches: int, microbatches: int = 1) -> list[list[tuple[Any, ...]]]:
    """Return what every lane does."""

    def sizes(minibatch: int) -> int | None:
        return microbatches if minibatch < minibatches else None

    return [list(stream_actions(stage, stages, staleness, sizes)) for stage in range(stages)]


def test_pipedreams_figure_cell_by_cell() -> None:
    stages = 4
    actions = [[Action(s, kind, m) for kind, m, *_ in own] for s, own in enumerate(lanes(stages, "stash", 8))]
    schedule = Schedule("stream", tuple(map(tuple, actions)))
    rows: list[list[str]] = [[] for _ in range(stages)]
    for (lane, position), tick in schedule.clocks.items():
        stage, kind, minibatch = schedule.lanes[lane][position]
        rows[lane] += ["."] * (tick - len(rows[lane]))
        rows[lane].append(f"{kind}{minibatch + 1}.{weight_version('stash', stages, stage, minibatch) + 1}")
    found = [f"worker {lane + 1} | " + " ".join(f"{cell:<4}" for cell in row).rstrip() for lane, row in enumerate(rows)]
    assert found == FIGURE.strip().splitlines()


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("staleness", "microbatches"), [("stash", 1), ("vertical", 1), ("2bw", 1), ("2bw", 5)])
def test_a_version_is_there_when_it_is_used_and_no_more_are_held(
    staleness: str, microbatches: int, stages: int
) -> None:
    for stage, own in enumerate(lanes(stages, staleness, 12, microbatches)):
        updates, begun, flying, most = 0, 0, list[int](), 0
        for kind, minibatch, place, last in own:
            version = weight_version(staleness, stages, stage, minibatch)
            assert version == reference.version(staleness, stages, stage, minibatch)
            assert version <= updates
            if kind == "F":
                flying.append(minibatch)
                begun += place == 0
            else:
                assert flying.pop(0) == minibatch
                updates += last
            assert len(flying) <= stages - stage
            oldest = min(weight_version(staleness, stages, stage, one) for one in (*flying, begun))
            most = max(most, updates + 1 - oldest)
        assert not flying
        assert updates == 12
        assert most == versions_held(staleness, stages, stage)


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, note: Any) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.note = note
        note("F", weight)
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value, weight = ctx.saved_tensors
        ctx.note("B", weight)
        return gradient * weight, (gradient * value).sum().reshape(1), None


class Noting(nn.Module):
    """Scales by a weight, and notes which value of it a forward and a backward use."""

    def __init__(self, seen: list[tuple[str, float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.seen = [seen]

    def note(self, kind: str, weight: Tensor) -> None:
        if weight.device.type == "cpu" and type(weight).__name__ != "FakeTensor":
            self.seen[0].append((kind, weight.item()))

    def forward(self, value: Tensor) -> Tensor:
        return _Noting.apply(value, self.weight, self.note)


@pytest.mark.parametrize("staleness", STALENESS)
def test_forward_and_backward_of_a_run_use_the_version_of_the_figure(staleness: str) -> None:
    stages = 4
    seen: list[list[tuple[str, float]]] = [[] for _ in range(stages)]
    model = nn.Sequential(*(Noting(own) for own in seen))
    pipe = autosplit(model, devices=[CPU] * stages, chunks=4, cut="operations", sample=torch.ones(4, 1).double())
    assert [len(stage.nodes) for stage in pipe.plan.stages] == [1] * stages
    versions: dict[int, list[float]] = defaultdict(list)

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        stage = len(versions)
        versions[stage] = [parameters[0].item()]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: versions[stage].append(parameters[0].item()))
        return optimizer

    items = [(torch.full((4, 1), 1.0 + m / 10).double(), torch.zeros(4, 1).double()) for m in range(8)]
    list(pipe.train_stream(items, loss_fn=nn.MSELoss(), optimizer=made, staleness="vertical"))  # what is recorded
    for own in seen:
        own.clear()
    versions.clear()
    list(pipe.train_stream(items, loss_fn=nn.MSELoss(), optimizer=made, staleness=staleness))
    for stage, own in enumerate(seen):
        used = [(kind, versions[stage].index(value)) for kind, value in own]
        each = 4 if staleness == "2bw" else 1
        expected = [weight_version(staleness, stages, stage, m) for m in range(8) for _ in range(each)]
        assert [version for kind, version in used if kind == "F"] == expected
        assert [version for kind, version in used if kind == "B"] == expected
        assert [kind for kind, _ in used] == [k for k, *_ in lanes(stages, staleness, 8, each)[stage]]
