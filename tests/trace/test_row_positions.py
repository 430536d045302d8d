"""Rows that are read by an index that depends on the model's state: the next call may have another one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "modulo": lambda h, shift: h[(torch.arange(len(h)) + shift) % len(h)],
    "product": lambda h, shift: h[(torch.arange(len(h)) * (1 - 0.1 * shift)).long()],
    "index_select": lambda h, shift: h.index_select(0, (torch.arange(len(h)) + shift) % len(h)),
    "two indices": lambda h, shift: h[(torch.arange(len(h)) + shift) % len(h), torch.zeros(len(h)).long()][:, None],
    "take_along_dim": lambda h, shift: h.take_along_dim(((torch.arange(len(h)) + shift) % len(h))[:, None], 0),
    "own column": lambda h, shift: h[torch.arange(len(h)), shift.expand(len(h))][:, None],
    "most likely": lambda h, shift: h[torch.arange(len(h)), (h * (1 + shift)).argmax(1)][:, None],
}


class Reads(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(6, 8), nn.Linear(8, 3), read
        self.register_buffer("shift", torch.tensor(0))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h + self.read(h, self.shift if shift is None else shift))


@pytest.mark.parametrize("argument", [False, True], ids=["buffer", "argument"])
@pytest.mark.parametrize("name", READS)
def test_an_index_that_depends_on_state(name: str, argument: bool) -> None:
    torch.manual_seed(0)
    model = Reads(READS[name]).double()
    plain, x = copy.deepcopy(model), torch.randn(7, 6).double()
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=3)
    for shift in map(torch.tensor, (0, 1, 3)):
        plain.shift.copy_(shift)
        pipe.shift.copy_(shift)
        args = (x, shift) if argument else (x,)
        torch.testing.assert_close(pipe(*args), plain(*args), rtol=1e-12, atol=1e-12)
    assert pipe.plan is not None
    by_rows = pipe.plan.class_flops["micro"] == 1.0
    assert by_rows == (name in ("own column", "most likely"))
