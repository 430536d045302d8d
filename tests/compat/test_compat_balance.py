from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.compat import balance as balancing
from autosplit.compat import balance_by_size, balance_by_time


class Costly(nn.Module):
    """Takes as many seconds of a clock that the test keeps as it is told, and counts its calls."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.norm = nn.BatchNorm1d(1)

    def __deepcopy__(self, memo):
        return Costly(self.clock, self.seconds)

    def forward(self, x):
        assert self.training
        self.clock[0] += self.seconds
        return self.norm(x)


class Grows(nn.Module):
    """Keeps as many tensors like its input as it is told."""

    def __init__(self, times, width=1):
        super().__init__()
        self.times = times
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        for _ in range(self.times):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


@pytest.mark.parametrize(
    ("seconds", "partitions", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([6, 5, 4, 3, 2, 1], 3, [1, 2, 3]),
        ([1, 1, 1, 1], 4, [1, 1, 1, 1]),
    ],
)
def test_the_slowest_partition_is_the_least(monkeypatch, seconds, partitions, expected):
    clock = [0.0]
    monkeypatch.setattr(balancing, "_now", lambda place: clock[0])
    model = nn.Sequential(*[Costly(clock, second) for second in seconds]).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample, state = torch.rand(3, 1), torch.get_rng_state()
    assert balance_by_time(partitions, model, sample, timeout=0.01, device="cpu") == expected
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_count_by_their_scale():
    model = nn.Sequential(*[Grows(3 - place, width=30 * (place + 1)) for place in range(3)])
    sample = torch.rand(10, 100)
    assert balance_by_size(2, model, sample, param_scale=0.0, device="cpu") == [1, 2]
    assert balance_by_size(2, model, sample, param_scale=4.0, device="cpu") == [2, 1]


def test_gradients_that_are_there_are_not_lost():
    model = nn.Sequential(nn.Linear(2, 2))
    model(torch.rand(3, 2)).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(1, model, torch.rand(3, 2), device="cpu")
