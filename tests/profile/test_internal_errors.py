"""A fault of autosplit's own is raised as what it is; what the model or torch cannot do on fakes is estimated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit import plan
from autosplit.errors import ProfileError, is_internal
from autosplit.profile.node_costs import ledger
from autosplit.profile.node_costs.fake import on_fakes


class Odd(torch.autograd.Function):
    """Its backward raises what a fault of autosplit's own may raise too, on fake tensors at least."""

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if type(gradient) is not Tensor:
            raise KeyError("fake")
        return gradient * 2


class Model(nn.Module):
    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.first, self.last, self.odd = nn.Linear(8, 8), nn.Linear(8, 8), odd

    def forward(self, value: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(value))
        return self.last(Odd.apply(hidden) if self.odd else hidden)


def planned(model: nn.Module) -> list[str]:
    return list(plan(model, "2xL4-24GB", sample=torch.ones(8, 8), schedule="1f1b", chunks=2).notes)


def test_a_fault_of_the_profile_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(odd=False)
    assert not any("fake tensors" in note for note in planned(model))
    monkeypatch.delattr(ledger, "moved_bytes")
    with pytest.raises(NameError, match="moved_bytes"):
        planned(model)


def test_what_the_model_raises_on_fake_tensors_is_told() -> None:
    assert any("KeyError" in note for note in planned(Model(odd=True)))


def test_only_the_last_frame_counts() -> None:
    def fails() -> None:
        raise KeyError("of the model's")

    with pytest.raises(ProfileError, match="a backward does not run on fake tensors"), on_fakes("a backward"):
        fails()
    assert not is_internal(KeyError())
