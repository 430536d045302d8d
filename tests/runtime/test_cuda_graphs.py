"""graphs=True on a device: the bits of the same stages without graphs, and nothing stale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit
from tests.runtime.graph_pipes import same
from tests.runtime.test_graphs import ROWS, SCHEDULES, WIDTH, Net, batch

pytestmark = pytest.mark.cuda
DEVICES = [["cuda:0"] * 2, ["cpu", "cuda:0"], ["cuda:0", "cpu"]]


def pipes(devices: list[str], **options: Any) -> list[tuple[Any, nn.Module]]:
    """Return a pipe with graphs and one without, of equal models, and the models; the cut is one."""
    torch.manual_seed(0)
    first = Net()
    models = first, copy.deepcopy(first)
    sample = torch.zeros(ROWS, WIDTH)
    plain = autosplit(models[1], devices=devices, chunks=3, sample=sample, **options)
    graphs = autosplit(models[0], devices=devices, chunks=3, sample=sample, plan=plain.plan, graphs=True)
    return list(zip((graphs, plain), models, strict=True))


def train(both: list[tuple[Any, nn.Module]], steps: int = 5, *, cast: bool = False) -> None:
    """Train both; losses, gradients and buffers are the same bits after every step."""
    for step in range(steps):
        found = []
        value, target = batch()
        for pipe, model in both:
            torch.manual_seed(step)
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast):
                loss = pipe.train_step(value.to("cuda:0"), target=target.to("cuda:0"), loss_fn=nn.MSELoss())
            found.append([loss, *(p.grad for p in model.parameters()), *model.buffers()])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
        same(*found)


def lines(pipe: Any) -> list[str]:
    return [line for line in pipe.report().splitlines() if line.startswith("graphs: ")]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_same_bits(schedule: str) -> None:
    both = pipes(DEVICES[0], schedule=schedule, **{k: v for k, v in SCHEDULES[schedule].items() if k != "stages"})
    train(both)
    assert all("as graphs" in line and "not all" not in line for line in lines(both[0][0])), lines(both[0][0])


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("again", ["never", "always", "block"])
def test_recompute_and_devices_beside_the_cpu(again: str, devices: list[str]) -> None:
    both = pipes(devices, recompute=again)
    train(both)
    assert any("as graphs" in line for line in lines(both[0][0])), lines(both[0][0])


def test_under_autocast() -> None:
    train(both := pipes(DEVICES[0]), cast=True)
    assert all("not all" not in line for line in lines(both[0][0])), lines(both[0][0])


def test_calls_and_parameters_that_are_replaced() -> None:
    both = pipes(DEVICES[0])
    for step in range(6):
        found, value = [], torch.randn(ROWS, WIDTH, device="cuda:0")
        for pipe, model in both:
            torch.manual_seed(step)
            model.zero_grad(set_to_none=True)
            if step == 3:
                state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
            given = value.clone().requires_grad_()
            output = pipe(given)
            output.square().sum().backward()
            evaluated = pipe.eval_step(value)
            found.append([output.detach(), evaluated, given.grad, *(p.grad for p in model.parameters())])
        same(*found)


def test_compiled_stages_in_graphs() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    reference = copy.deepcopy(model).to("cuda:0")
    pipe = autosplit(model, devices=DEVICES[0], chunks=2, compile=True, graphs=True, sample=torch.zeros(8, 64))
    for _ in range(4):
        value, target = torch.randn(8, 64, device="cuda:0"), torch.randn(8, 64, device="cuda:0")
        model.zero_grad()
        reference.zero_grad()
        loss = pipe.train_step(value, target=target, loss_fn=nn.MSELoss())
        expected = nn.functional.mse_loss(reference(value), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=1e-3)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-2, atol=1e-3)
