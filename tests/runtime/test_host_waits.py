"""The host waits for no device while it issues a step: nothing reads a device's numbers, nor copies pageable memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autosplit.runtime import ops, transport
from tests.runtime.happens_before import HOST, Wait, problems
from tests.runtime.lane_models import PLACES, ROWS, WIDTH, Skips, assert_close
from tests.runtime.recorded_pipe import RecordedPipe
from tests.runtime.test_cuda_step import CASES, others_of

pytestmark = pytest.mark.usefixtures("double")


class Norms(nn.Module):
    """Norms that count; torch's own forward of one with ``momentum=None`` reads its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.other = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.norm(self.first(value)))
        return self.last(self.other(value))


class Labelled(nn.Module):
    """A model that makes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(torch.tanh(self.first(value))), (value[:, 0] > 0).long())


def host_waits(run: RecordedPipe) -> int:
    return sum(isinstance(entry, Wait) and entry.stream == HOST for entry in run.streams.log)


def second_step(run: RecordedPipe, target: Any, loss_fn: Any) -> list[str]:
    """Run two steps; return what made the host wait in the second."""
    for _ in range(2):
        run.streams.host_reads.clear()
        before = host_waits(run)
        run.train(torch.randn(run.rows, WIDTH), target, loss_fn)
    assert problems(run.streams.log) == []
    return run.streams.host_reads + ["event"] * (host_waits(run) - before)


@pytest.mark.parametrize(
    ("case", "place", "schedule"),
    [
        *((case, "two cards", "1f1b") for case in CASES),
        ("torch's mean", "one card", "zb_h1"),
        ("counted", "back and forth", "zb_h1"),
    ],
)
def test_a_training_step(case: str, place: str, schedule: str) -> None:
    make, target_of, loss_of = CASES[case]
    loss_fn = loss_of()
    run = RecordedPipe(make(), *PLACES[place], schedule=schedule, others=others_of(loss_fn))
    proved = case in ("of its own", "with parameters", "several outputs")
    assert second_step(run, target_of(), loss_fn) == (["tolist"] if proved else [])


@pytest.mark.parametrize("place", ["one card", "two cards"])
def test_running_statistics(place: str) -> None:
    run = RecordedPipe(Norms(), *PLACES[place], schedule="1f1b", rows=8)
    assert second_step(run, torch.randn(8, WIDTH), nn.MSELoss()) == []


@pytest.mark.parametrize("recompute", ["always", "block"])
def test_a_stage_that_runs_again(recompute: str) -> None:
    run = RecordedPipe(Skips(), *PLACES["two cards"], schedule="1f1b", recompute=recompute)
    assert second_step(run, torch.randn(ROWS, WIDTH), nn.MSELoss()) == []


def test_the_models_own_loss() -> None:
    run = RecordedPipe(Labelled(), *PLACES["two cards"], schedule="1f1b")
    assert second_step(run, None, None) == []


def test_a_batch_in_host_memory() -> None:
    run = RecordedPipe(Skips(), *PLACES["from the CPU"], schedule="1f1b")
    assert second_step(run, torch.randn(ROWS, WIDTH), nn.MSELoss()) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Callable[[], Any]) -> None:
    run = RecordedPipe(model := Skips(), *PLACES["two cards"])
    value = torch.randn(ROWS, WIDTH)
    with mode():
        assert_close(run.outputs(value), [model(value)])
    with run.recording():
        run.pipe.eval_step(run.put(value))
    assert run.streams.host_reads == []
    assert host_waits(run) == 0


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda tensor: tensor.sum().item(),
    "bool": lambda tensor: bool((tensor > 0).any()),
    "float": lambda tensor: float(tensor.sum()),
    "a list": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "a mask": lambda tensor: tensor[tensor > 0],
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "a constant": lambda tensor: torch.tensor([1.0, 2.0], device="cuda:0"),
}


@pytest.mark.parametrize("read", READS)
def test_a_wait_is_found(read: str) -> None:
    """What this file rests on: each way to wait, put into a step, is seen."""
    run = RecordedPipe(Skips(), *PLACES["one card"])
    transfer = ops.transfer

    def reading(bundle: Any, *given: Any) -> Any:
        READS[read](bundle[0].detach())
        return transfer(bundle, *given)

    with mock.patch.object(transport, "transfer", reading):
        run.train(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.MSELoss())
    assert run.streams.host_reads
