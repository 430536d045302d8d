"""Modules that read values in Python and treat each row alone run by microbatch; others see the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import Sample, autosplit
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward

WIDTH, EXPERTS = 6, 3


class Odd(nn.Module):
    """Experts, and a forward that a case brings along."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self._body = body

    def forward(self, x: Tensor) -> Any:
        return self._body(self, x)


class Net(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)) for _ in range(2))
        self.odd = Odd(body)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(self.odd(torch.relu(self.a(x)))))


def skips_idle_experts(odd: Odd, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    chosen = odd.router(flat).topk(2, -1).indices
    out = flat.clone()
    for index, expert in enumerate(odd.experts):
        mask = (chosen == index).any(-1)
        if mask.any():
            out[mask] = out[mask] + expert(flat[mask])
    return out.view_as(x)


def continues_on_empty(odd: Odd, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    chosen = odd.router(flat).argmax(-1)
    out = torch.zeros_like(flat)
    for index, expert in enumerate(odd.experts):
        rows = (chosen == index).nonzero().squeeze(-1)
        if rows.numel() == 0:
            continue
        out = out.index_add(0, rows, expert(flat[rows]))
    return out.view_as(x)


def sorts_tokens(odd: Odd, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    chosen = odd.router(flat).argmax(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
    parts = [expert(part) for expert, part in zip(odd.experts, flat[order].split(counts), strict=True)]
    out = torch.empty_like(flat)
    out[order] = torch.cat(parts)
    return out.view_as(x)


def formats_a_norm(odd: Odd, x: Tensor) -> Tensor:
    h = odd.experts[0](x)
    str(h.norm().item())
    return h


def branches_on_a_mean(odd: Odd, x: Tensor) -> Tensor:
    h = odd.experts[0](x)
    return h if h.mean() > 0 else h * 2


def branches_when_large(odd: Odd, x: Tensor) -> Tensor:
    h = odd.experts[0](x)
    return h / h.detach().abs().max() if h.detach().abs().max() > 1e3 else h


def clips_by_the_largest(odd: Odd, x: Tensor) -> Tensor:
    h = odd.experts[0](x)
    return h / max(1e3, h.detach().abs().max().item())


def iterates_until_still(odd: Odd, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(9):
        step = torch.tanh(0.3 * odd.experts[0](z) + x)
        if (step - z).norm() < 1e-2:
            break
        z = step
    return z


ALONE = [skips_idle_experts, continues_on_empty, sorts_tokens, formats_a_norm]
TOGETHER = [branches_on_a_mean, branches_when_large, clips_by_the_largest, iterates_until_still]


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "body", [ALONE[0], TOGETHER[0], *(pytest.param(b, marks=pytest.mark.slow) for b in (*ALONE[1:], *TOGETHER[1:]))]
)
def test_class_and_equality(body: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    plain = Net(body)
    found = trace(plain, Sample(batch(7)))
    classes = {info.name: info.node_class for _, info in found.graph.compute_nodes()}
    assert list(found.whole) == ["odd"]
    assert classes["odd#0"] is (NodeClass.MICRO if body in ALONE else NodeClass.FULL)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for mode in (True, False):
        for number, rows in enumerate((7, 2)):
            runs = [forward_backward(m.train(mode), Batch((batch(rows, number),))) for m in (plain, pipe)]
            assert_equal_runs(runs[1], runs[0])


def reads_in_eval_mode(odd: Odd, x: Tensor) -> Tensor:
    h = odd.experts[0](x)
    norm = h.detach().norm().item()
    if odd.training:
        return h
    return F.relu(h) if norm > 5 else h


def test_what_holds_in_one_mode_is_asked_again_in_the_other() -> None:
    torch.manual_seed(0)
    plain = Net(reads_in_eval_mode)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for scale in (1.0, 50.0):
        for mode in (True, False):
            x = Batch((batch(7) * scale,))
            runs = [forward_backward(module.train(mode), x) for module in (plain, pipe)]
            assert_equal_runs(runs[1], runs[0])
