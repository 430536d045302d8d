"""What tensors without a shape, and tensors of torch.func's transforms, do to a recording: own words, equal results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:2 devices were given")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Inner(nn.Module):
    """A layer, and what a case does with it."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(WIDTH, WIDTH).double(), body

    def forward(self, value: Tensor) -> Tensor:
        return self.body(self.layer, value)


def around(body: Callable[..., Tensor]) -> nn.Module:
    """Return an inner module between layers that hold most of the parameters."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), Inner(body), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).double()


def split(model: nn.Module, **options: Any) -> Any:
    return autosplit(copy.deepcopy(model), **({"devices": 2, "chunks": 3} | options))


def check(model: nn.Module, pipe: Any, value: Tensor | None = None) -> None:
    batch = Batch((numbers(7, WIDTH) if value is None else value,))
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch))


def nested(layer: nn.Module, value: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor(list(layer(value)[:, None].unbind()))
    return torch.nested.to_padded_tensor(rows, 0.0)[:, 0]


def jagged(layer: nn.Module, value: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor(list(value[:, None].unbind()), layout=torch.jagged)
    return layer(rows).values()


def in_place(layer: Any, value: Tensor) -> Tensor:
    with torch.no_grad():
        layer.bias.mul_(0.9)
    return layer(value)


def in_place_and_read(layer: Any, value: Tensor) -> Tensor:
    factor = value.detach().abs().sum().item()
    return in_place(layer, value) * (1.0 if factor > 0 else 2.0)


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "vmap over rows": lambda layer, x: torch.vmap(lambda row: torch.tanh(layer(row)))(x),
    "vmap along rows": lambda layer, x: torch.vmap(lambda c: c * c.mean(), in_dims=1, out_dims=1)(layer(x)),
    "grad": lambda layer, x: torch.func.grad(lambda v: torch.tanh(layer(v)).sum())(x),
    "jacrev": lambda layer, x: torch.vmap(torch.func.jacrev(torch.tanh))(layer(x)).sum(-1),
}
NO_GRAPH: dict[str, tuple[Callable[..., Tensor], str]] = {
    "nested": (nested, "makes a nested tensor, which has no shape"),
    "jagged": (jagged, "makes a nested tensor, which has no shape"),
    "a parameter in place": (in_place, "forward changes the parameter '3.layer.bias' in place"),
    "a parameter in place, and a read": (in_place_and_read, "forward changes the parameter '3.layer.bias' in place"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_module_with_a_transform_is_one_operation(name: str) -> None:
    model = around(TRANSFORMS[name])
    pipe = split(model)
    check(model, pipe)
    assert pipe.plan.rung == "recorded"
    assert "uses torch.vmap or torch.func" in pipe.report()
    assert (pipe.plan.class_flops["full"] == 0.0) == (name != "vmap along rows")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_at_the_root_is_told_in_own_words(name: str) -> None:
    model = Inner(TRANSFORMS[name])
    pipe = split(model)
    with pytest.warns(UserWarning, match="has collapsed: .* uses torch.vmap or torch.func, whose inner tensors"):
        check(model, pipe)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", NO_GRAPH)
def test_what_no_graph_holds_runs_as_the_model_and_is_told_in_own_words(name: str, recompute: str) -> None:
    body, why = NO_GRAPH[name]
    model = around(body)
    pipe = split(model, recompute=recompute)
    with pytest.warns(UserWarning, match=f"has collapsed: .*{why}"):
        check(model, pipe)
    check(model, pipe)
    for mine, own in zip(pipe.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=0)
