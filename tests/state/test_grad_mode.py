"""A forward that asks whether gradients are on hears what holds for the call, with and without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit

ASKED = torch.is_grad_enabled


class Asks(nn.Module):
    """Scales, and sets its attribute, by whether gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(6, 6), nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen = 1
        return self.second(self.first(x) * (1 if torch.is_grad_enabled() else 2))


class AsksTensor(Asks):
    """Asks a tensor instead."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.seen = int(x.requires_grad)
        return self.second(x * (1 if x.grad_fn is not None else 2))


class Encoder(nn.Module):
    """Torch's own layers ask too, of which nothing hangs but the way that they take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def both(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    plain = kind().eval()
    model = copy.deepcopy(plain)
    return plain, model, autosplit(model, devices=["cpu"] * 2, chunks=2)


@pytest.mark.parametrize("kind", [Asks, AsksTensor])
@pytest.mark.parametrize("modes", [(True, False, True), (False, True, False)])
def test_a_model_that_asks_gives_what_it_would_by_itself(modes: tuple[bool, ...], kind: type[nn.Module]) -> None:
    plain, model, pipe = both(kind)
    x = torch.randn(4, 6)
    for mode in modes:
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(pipe(x), plain(x))
        assert model.seen == plain.seen
    with torch.inference_mode():
        torch.testing.assert_close(pipe(x), plain(x))
    assert pipe._core.recordings.tree is not None
    assert torch.is_grad_enabled is ASKED


def test_the_line_that_asks_is_said() -> None:
    _, _, pipe = both(Asks)
    with torch.no_grad():
        pipe(torch.randn(4, 6))
    assert f"forward asks whether gradients or inference mode are on ({__file__}:" in " ".join(pipe.report().split())


@pytest.mark.parametrize("mode", [True, False])
def test_what_torch_asks_itself_needs_no_tree(mode: bool) -> None:
    plain, _, pipe = both(Encoder)
    x = torch.randn(4, 3, 6)
    with torch.set_grad_enabled(mode):
        torch.testing.assert_close(pipe(x), plain(x))
    assert pipe._core.recordings.tree is None
