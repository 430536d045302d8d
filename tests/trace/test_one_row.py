"""One row: recordings that differ by what changes nothing there hold for it; whatever else differs does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autosplit import Sample, autosplit
from autosplit.trace.inputs.inputs import flatten
from autosplit.trace.ladder import trace
from autosplit.trace.recording.gather import gather

WIDTH = 4
Body = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """A layer, what a case makes of it, and two equal blocks behind it."""

    count: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("count", torch.zeros(1, WIDTH))
        self.constants = [torch.full((WIDTH,), 2.0), torch.full((WIDTH,), 3.0)]

    def forward(self, x: Tensor) -> Any:
        value = self.body(self, self.layer(x))
        if isinstance(value, tuple):
            return value
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).expand(len(x), -1))


def places(net: Net) -> Tensor:
    """Return a row of numbers, as positions are: [1, WIDTH]."""
    return torch.arange(WIDTH, device=net.count.device)[None] * 0.5


def positions_expanded(net: Net, x: Tensor) -> Tensor:
    """As transformers does it for packed sequences."""
    row = places(net)
    if len(x) != row.shape[0]:
        row = row.expand(len(x), -1)
    return x * torch.cumsum(row, 1) + row


def expanded_as(net: Net, x: Tensor) -> Tensor:
    row = places(net)
    return x * (row.expand_as(x) if len(x) > 1 else row)


def expanded_when_alone(net: Net, x: Tensor) -> Tensor:
    return torch.relu(x.expand(1, WIDTH) if len(x) == 1 else x)


HOLD: tuple[Body, ...] = (positions_expanded, expanded_as, expanded_when_alone)


def another_number(net: Net, x: Tensor) -> Tensor:
    return x * (2.0 if len(x) > 1 else 3.0)


def one_more_operation(net: Net, x: Tensor) -> Tensor:
    row = places(net)
    return x * 2 + row if len(x) == 1 else x + row.expand(len(x), -1)


def another_operation(net: Net, x: Tensor) -> Tensor:
    return torch.sin(x) if len(x) == 1 else torch.cos(x)


def expanded_to_two(net: Net, x: Tensor) -> Tensor:
    row = places(net)
    return x + (row.expand(2, -1).sum(0, keepdim=True) if len(x) == 1 else row.expand(len(x), -1))


def squeezed_but_for_one(net: Net, x: Tensor) -> Tensor:
    """The graph's squeeze would drop the only row."""
    return torch.relu(x.squeeze() if len(x) > 1 else x).reshape(-1, WIDTH)


def cut_for_one(net: Net, x: Tensor) -> Tensor:
    """The graph's slice would be shorter than the row."""
    return torch.relu(x[:, : 2 * len(x)] if len(x) > 1 else x)


def turned(net: Net, x: Tensor) -> Tensor:
    """The same shape, in another order."""
    return x + (places(net)[:, [3, 2, 1, 0]] if len(x) > 1 else places(net))


def of_another_operand(net: Net, x: Tensor) -> Tensor:
    one, other = places(net), places(net) + 1
    return x + (other if len(x) == 1 else one.expand(len(x), -1))


def gives_another_result(net: Net, x: Tensor) -> Any:
    one, other = torch.sin(x), torch.cos(x)
    return (one,) if len(x) == 1 else (other,)


def another_constant(net: Net, x: Tensor) -> Tensor:
    return x * net.constants[int(len(x) == 1)]


def is_special(x: Tensor) -> bool:
    """Tell whether a batch is one on which no recording at a few rows is made."""
    return len(x) == 1 or len(x) > 8


def another_precision(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16 if is_special(x) else torch.bfloat16):
        return (x @ net.layer.weight).to(x.dtype)


def scaling_function(scale: float) -> Any:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * scale

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * scale

    return Scale


TWICE, THRICE = scaling_function(2.0), scaling_function(3.0)


def another_function(net: Net, x: Tensor) -> Tensor:
    """Both have one name."""
    return (THRICE if is_special(x) else TWICE).apply(x)


def broadcast(net: Net, x: Tensor) -> Tensor:
    """A vector beside one row is as that row; here it is behind a sum that tells them apart."""
    row = places(net)[0] if len(x) == 1 else places(net).expand(len(x), -1)
    return x + row.sum(0)


def written_to_the_buffer(net: Net, x: Tensor) -> Tensor:
    """Where the copy is left out, the buffer is changed."""
    row = net.count.view(1, WIDTH)
    row = row if len(x) == 1 else row.repeat(len(x), 1)
    return x + row.add_(1)


def dropped_in_a_copy(net: Net, x: Tensor) -> Tensor:
    """A copy has other strides, and dropout draws in the order of the memory."""
    return torch.dropout(x.contiguous() if len(x) > 1 else x, 0.5, train=True)


def copied_when_alone(net: Net, x: Tensor) -> Tensor:
    return torch.relu(x.contiguous() if len(x) == 1 else x)


DIFFER: tuple[Body, ...] = (
    another_number,
    one_more_operation,
    another_operation,
    expanded_to_two,
    squeezed_but_for_one,
    cut_for_one,
    turned,
    of_another_operand,
    gives_another_result,
    another_constant,
    another_precision,
    another_function,
    broadcast,
    written_to_the_buffer,
    dropped_in_a_copy,
    copied_when_alone,
)


def named(cases: tuple[Body, ...]) -> Any:
    return pytest.mark.parametrize("body", cases, ids=lambda body: body.__name__)


def least_rows(body: Body, *, rows: int = 7, device: str = "cpu") -> int:
    with torch.device(device):
        model = Net(body)
    return gather(model, flatten(model, Sample(torch.ones(rows, WIDTH, device=device)))).min_rows


@named(HOLD)
def test_what_changes_nothing_at_one_row_may_be_left_out_there(body: Body) -> None:
    assert least_rows(body) == 1
    assert least_rows(body, device="meta") == 1


@named(DIFFER)
def test_what_differs_at_one_row_does_not_hold_there(body: Body) -> None:
    assert least_rows(body) == 2


@named((another_precision, another_function))
@pytest.mark.parametrize("first", [12, 5])
def test_what_a_later_size_runs_with_is_the_models(body: Body, first: int) -> None:
    torch.manual_seed(0)
    model = Net(body)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=2)
    for rows in (first, 12):
        x = torch.randn(rows, WIDTH)
        assert torch.allclose(pipe(x), model(x), rtol=1e-6, atol=1e-6)


@named(HOLD)
def test_the_graph_at_one_row_is_the_model(body: Body) -> None:
    torch.manual_seed(0)
    model, x = Net(body), torch.randn(1, WIDTH)
    graph = trace(model, Sample(torch.randn(7, WIDTH))).graph
    (made,) = fx.Interpreter(graph.root, graph=graph.graph).run(1, x)
    wanted = model(x)
    assert torch.equal(made, wanted)
    weights = list(model.parameters())
    for got, want in zip(*(torch.autograd.grad(out.sum(), weights) for out in (made, wanted)), strict=True):
        assert torch.equal(got, want)


@named(HOLD)
def test_a_batch_of_one_row_is_recorded(body: Body) -> None:
    assert least_rows(body, rows=1) == 1
