"""Draws whose size hangs on values: a pipe draws them in their turn, as its model does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from tests.models.named import numbers

WIDTH, SHARE = 8, 0.3
pytestmark = pytest.mark.filterwarnings("ignore:.*(stage|collapsed):UserWarning")


class Codebook(nn.Module):
    """Vector quantisation that draws new entries for those that were not used for a while."""

    def __init__(self, draw: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.register_buffer("entries", numbers(WIDTH, WIDTH))
        self.register_buffer("usage", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        taken = torch.cdist(value, self.entries).argmin(-1)
        found = F.embedding(taken, self.entries)
        with torch.no_grad():
            self.usage.mul_(0.6).add_(F.one_hot(taken, WIDTH).sum(0), alpha=0.4)
            unused = self.usage < 0.5
            self.entries[unused] = self.draw(value, int(unused.sum()))
            self.usage[unused] = 1.0
        return value + (found - value).detach()


CODES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "randint": lambda value, count: value[torch.randint(len(value), (count,))],
    "randperm": lambda value, count: value.repeat(WIDTH, 1)[:count][torch.randperm(count)],
    "rand": lambda value, count: torch.rand(count, WIDTH, dtype=torch.float64),
    "multinomial": lambda value, count: value[torch.ones(len(value)).multinomial(max(count, 1), replacement=True)][
        :count
    ],
}


@pytest.mark.parametrize("loss_fn", [None, F.mse_loss], ids=["call", "train_step"])
@pytest.mark.parametrize("name", CODES)
def test_a_draw_whose_size_hangs_on_values(name: str, loss_fn: Callable[..., Tensor] | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(SHARE)) for _ in range(3)]
    plain = nn.Sequential(layers[0], Codebook(CODES[name]), *layers[1:]).double()
    pipe, counts = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=4), set()
    for step in range(5):
        value = numbers(9, WIDTH, seed=step) * (1 if step % 2 else 0.2)
        torch.manual_seed(step)
        outputs = plain(value)
        expected = outputs if loss_fn is None else loss_fn(outputs, value)
        state = torch.get_rng_state()
        torch.manual_seed(step)
        found = pipe(value) if loss_fn is None else pipe.train_step(value, target=value, loss_fn=loss_fn)
        torch.testing.assert_close(found, expected.detach() if loss_fn else expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pipe.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
        assert torch.equal(state, torch.get_rng_state())
        counts.add(int((plain[1].usage == 1.0).sum()))
    assert len(counts) > 1
