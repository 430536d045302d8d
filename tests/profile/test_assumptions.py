"""Balanced routing: what experts are taken to do where no run says it, and that it is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit import plan
from autosplit.errors import ProfileError, is_internal
from autosplit.profile.node_costs import ledger
from autosplit.profile.node_costs.assumptions import parameters_met
from autosplit.profile.node_costs.fake import on_fakes
from tests.models.three_layers import Tripled

WIDTH, EXPERTS, CHOSEN = 8, 4, 2
ROUTER, EXPERT = WIDTH * EXPERTS + EXPERTS, WIDTH * WIDTH + WIDTH


class Routed(nn.Module):
    """Experts in a list; ``top_k`` of them see a row."""

    def __init__(self, *, said: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        if said:
            self.top_k = CHOSEN

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).topk(CHOSEN, -1).indices
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == number)
            y = y.index_add(0, rows, expert(x[rows]))
        return y


class Stacked(nn.Module):
    """Experts in one tensor, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_tok = EXPERTS, 1
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 3 * WIDTH))
        self.table = nn.Parameter(torch.zeros(EXPERTS, WIDTH))


class Net(nn.Module):
    """Routed experts between layers that hold most of the parameters."""

    def __init__(self, *, said: bool = True) -> None:
        super().__init__()
        self.up, self.routed, self.down = nn.Linear(64, WIDTH), Routed(said=said), nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.routed(self.up(x)))


class Unalike(nn.Module):
    """A list of layers, no two of them alike: no experts."""

    top_k = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Routed(), ROUTER + EXPERTS * EXPERT * CHOSEN // EXPERTS),
        (Routed(said=False), ROUTER + EXPERTS * EXPERT),
        (Stacked(), WIDTH * EXPERTS + WIDTH * 3 * WIDTH + EXPERTS * WIDTH),
        (Net(), 64 * WIDTH + WIDTH + ROUTER + CHOSEN * EXPERT + WIDTH * 64 + 64),
        (Unalike(), 32 + 8 + 32 + 4),
        (nn.Linear(4, 4), 20),
        (nn.ReLU(), 0),
    ],
    ids="list unsaid stacked inside unalike layer nothing".split(),
)
def test_the_parameters_that_a_row_meets(module: nn.Module, expected: int) -> None:
    assert parameters_met(module) == expected


class Odd(Tripled):
    """Its backward raises what a fault of autosplit's own may raise too, on fake tensors at least."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if type(gradient) is not Tensor:
            raise KeyError("fake")
        return gradient


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
