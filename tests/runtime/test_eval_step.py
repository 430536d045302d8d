"""``eval_step``: the plain model's eval forward, and nothing left behind."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.equivalence.equality import LANES, difference
from tests.models.named import numbers

WIDTH = 6


class Noisy(nn.Module):
    """Norms, dropout that depends on the mode, a draw that does not, and a buffer that counts in any mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        y = self.drop(self.norm(torch.tanh(self.a(x))))
        if self.training:
            y = y * 2
        return {"value": self.c(torch.tanh(self.b(y))), "training": torch.tensor(self.training)}


class Merging(nn.Linear):
    """Merges a second weight into the first for eval mode, as low-rank adapters do."""

    merged = False

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25))

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += self.extra.data if not mode else -self.extra.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + F.linear(x, self.extra)


def _flags(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


@pytest.mark.parametrize("lanes", LANES)
def test_an_eval_step_is_the_plain_models_eval_forward(lanes: str) -> None:
    plain = Noisy().double()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3, lanes=lanes)
    plain.b.eval()
    pipe.unsplit().b.eval()
    x = numbers(7, WIDTH)
    pipe.train_step(x, target=x, loss_fn=lambda o, t: F.mse_loss(o["value"], t), loss_reduction="mean")
    plain.load_state_dict(pipe.state_dict())
    own, flags = pipe.unsplit(), _flags(pipe)
    torch.manual_seed(5)
    state, thrown = torch.get_rng_state(), random.getstate()
    output = pipe.eval_step(x.clone().requires_grad_())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == thrown
    assert _flags(pipe) == flags == [True, *_flags(own)[1:]]
    assert not own.b.training
    plain.eval()
    expected = plain(x)
    assert list(output) == list(expected)
    assert difference(output["value"], expected["value"].detach()) <= 1e-12
    assert not output["training"]
    assert not output["value"].requires_grad
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(own.named_buffers())[name], buffer), name


@pytest.mark.filterwarnings("ignore:.* devices were given")
def test_modes_come_back_after_an_exception_and_by_a_modules_own_train() -> None:
    model = nn.Sequential(Merging(), nn.Tanh(), Merging().eval())
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=2)
    x, weights = torch.randn(4, WIDTH), [layer.weight.detach().clone() for layer in (model[0], model[2])]
    expected = copy.deepcopy(model).eval()(x)
    for bad in (x[:, :2], x):
        if bad is x:
            torch.testing.assert_close(pipe.eval_step(bad), expected)
        else:
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                pipe.eval_step(bad)
        assert _flags(model) == _flags(pipe) == [True, True, True, False]
        assert [model[0].merged, model[2].merged] == [False, True]
        for layer, weight in zip((model[0], model[2]), weights, strict=True):
            torch.testing.assert_close(layer.weight.detach(), weight)
