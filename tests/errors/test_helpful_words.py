"""Slips that many make, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import InputError, autosplit, plan


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.first(x) if mask is None else self.first(x) * mask[:, None]
        out: Tensor = self.second(hidden)
        return out


@pytest.mark.parametrize("model", [Masked(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))])
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), lambda output, labels: output.mean()])
def test_a_target_among_the_inputs_is_told_of_target(model: nn.Module, loss: Any) -> None:
    pipe = autosplit(model, devices=2, chunks=2)
    with pytest.raises(InputError, match=r"train_step\(x, target=y, loss_fn=...\)"):
        pipe.train_step(torch.randn(4, 8), torch.tensor([0, 1, 2, 3]), loss_fn=loss)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_of_the_output_alone_needs_no_target() -> None:
    pipe = autosplit(Masked(), devices=2, chunks=2)
    assert pipe.train_step(torch.randn(4, 8), loss_fn=lambda output, scale=2.0: scale * output.mean()).dim() == 0


def planned(**choices: Any) -> Any:
    return plan(Masked(), "2xH100-SXM5-80GB", 2, sample=torch.randn(4, 8), **choices)


@pytest.mark.parametrize("limit", ["20", " 80 ", "1.5", "1000"])
def test_a_limit_without_a_unit_is_asked_for_one(limit: str) -> None:
    with pytest.raises(InputError, match=rf"bytes; write the unit: '{limit.strip()}GiB', or '{limit.strip()}B'"):
        planned(memory_limit=limit)


def test_limits_that_say_what_they_are_stand() -> None:
    assert planned(memory_limit="20KiB").stages[0].memory.capacity_bytes == 20 * 2**10
    assert planned(memory_limit=str(2**30)).stages[0].memory.capacity_bytes == 2**30


def test_fp16_is_meant_as_amp() -> None:
    with pytest.raises(InputError, match=r"did you mean 'amp_fp16'\?"):
        planned(precision="fp16")
