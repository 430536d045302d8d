"""Optimizer state follows its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as HOOKS

from autosplit.runtime import optimizers as optimizers_of_autosplit
from autosplit.runtime.optimizers import bring, follow


def stepped(parameter: nn.Parameter) -> torch.optim.Adam:
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_state_of_the_parameters_shape_moves_and_the_step_count_stays():
    parameter = nn.Parameter(torch.ones(3))
    state = dict(stepped(parameter).state[parameter])
    bring(nn.Parameter(torch.empty(3, device="meta")), state)
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_a_step_brings_the_state_of_followed_parameters_only(monkeypatch: pytest.MonkeyPatch):
    followed, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizers = {p: stepped(p) for p in (followed, other)}
    brought = []
    monkeypatch.setattr(optimizers_of_autosplit, "bring", lambda parameter, state: brought.append(parameter))
    follow([followed])
    for optimizer in optimizers.values():
        optimizer.step()
    assert [id(p) for p in brought] == [id(followed)]


def test_a_step_after_followed_parameters_are_gone():
    gone, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = stepped(other)
    before = len(HOOKS)
    follow([gone])
    follow([other])
    assert len(HOOKS) == before + 2
    del gone
    optimizer.step()
    assert len(HOOKS) == before + 1


def test_nothing_to_follow_is_no_hook():
    before = len(HOOKS)
    follow([])
    assert len(HOOKS) == before
