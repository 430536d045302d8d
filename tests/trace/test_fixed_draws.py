"""FixedDraws: what is drawn does not depend on the shape, and the rest of a random operation is as ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.trace.compared_runs import FixedDraws

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "feature dropout": lambda x: F.dropout1d(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[:, 0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "normal": lambda x: x + torch.randn_like(x),
    "uniform": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "in place": lambda x: x * torch.empty_like(x).uniform_(1, 3) + torch.empty_like(x).normal_(1, 2),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.2)),
    "integers": lambda x: x + torch.randint_like(x, 2, 9),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "stochastic depth": lambda x: x * (0.8 + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)).floor() / 0.8,
    "choices": lambda x: x.gather(-1, x.softmax(-1).flatten(0, 1).multinomial(2).unflatten(0, x.shape[:2])),
    "lstm": lambda x: LSTM(x)[0],
}
LSTM = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True).double()


@pytest.mark.parametrize("name", DRAWS)
def test_parts_draw_what_the_whole_draws(name: str) -> None:
    draw = DRAWS[name]
    whole = torch.randn(7, 4, 6, dtype=torch.float64, requires_grad=True)
    parts = whole.detach().clone().requires_grad_()
    with FixedDraws() as mode:
        expected = draw(whole)
        actual = torch.cat([draw(part) for part in parts.split([3, 2, 2])])
        expected.cos().sum().backward()
        actual.cos().sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(parts.grad, whole.grad)
    assert mode.unknown == set()


def test_what_it_cannot_replace_is_named() -> None:
    with FixedDraws() as mode:
        torch.distributions.Gamma(torch.tensor(1.0), torch.tensor(1.0)).sample()
    assert mode.unknown == {"_standard_gamma"}
