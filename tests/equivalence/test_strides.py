"""Models that read their tensors by strides: what the pipeline copies lies in memory as the plain model's does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import Model
from tests.pairwise import in_turn

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda h: h,
    "dimensions swapped": lambda h: torch.tanh(h.transpose(0, 1)).transpose(0, 1),
    "channels last": lambda h: torch.tanh(h.transpose(1, 2)).transpose(1, 2),
    "heads merged in place": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "without the first column": lambda h: h[:, 1:],
    "every other column": lambda h: h[:, :, ::2],
    "expanded": lambda h: h[:, :1].expand(-1, 7, -1),
    "without the first row of another order": lambda h: h.transpose(0, 1)[1:].transpose(0, 1),
    "windows": lambda h: h.unfold(1, 4, 2)[..., 0],
}


class Strided(nn.Module):
    """Reads a hidden state by strides, along its rows and across them."""

    def __init__(self, layout: str, *, across: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layout, self.across = layout, across

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = LAYOUTS[self.layout](torch.tanh(self.first(x)))
        rows, columns, entries = h.stride()
        part = h.as_strided((h.shape[0], 2, 2), (rows, columns, entries), h.storage_offset())
        if self.across:
            part = part + torch.as_strided(h, (2, 2), (columns, rows), h.storage_offset())
        return self.last(h.repeat(1, 1, 2)[..., :6]), part


@in_turn(rest=False, layout=list(LAYOUTS), kind=((True, "inline"), (False, "threads")))
def test_a_read_by_strides_equals_the_plain_model(layout: str, kind: tuple[bool, str]) -> None:
    across, lanes = kind
    torch.manual_seed(0)
    plain = Strided(layout, across=across).double()
    pipe = autosplit(copy.deepcopy(plain), devices=2, chunks=3, lanes=lanes)
    for rows in (7, 4, 2):
        batch = Batch((torch.randn(rows, 8, 6, dtype=torch.double, requires_grad=True),))
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


def halves(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Outputs that lie in memory in another order than their dimensions."""
    h = model.a(x)
    turned = torch.tanh(h.transpose(0, 1)).transpose(0, 1)
    return h, turned, torch.tanh(h.transpose(1, 2)).transpose(1, 2), (turned * h).mean(0)


@pytest.mark.parametrize("rows", [2, 3, 7])
def test_merged_outputs_have_the_plain_models_strides(rows: int) -> None:
    model = Model(halves).float()
    plain = copy.deepcopy(model)
    outputs, expected = autosplit(model, devices=1, chunks=3)(torch.ones(rows, 4, 6)), plain(torch.ones(rows, 4, 6))
    assert [output.stride() for output in outputs] == [output.stride() for output in expected]
