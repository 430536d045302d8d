"""Shapes that are told where torch's own shape functions refuse: those that its kernels make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from autosplit.profile.node_costs.fake import fake_mode
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.trace.shapes.shape_rules import ShapeRules, new_tensor

GROUPED_MM, HISTC = torch.ops.aten._grouped_mm.default, torch.ops.aten.histc.default


def told(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return what an operation gives by the rule, and check that meta and fake tensors follow it."""
    new = new_tensor(func, args, kwargs)
    assert new is not None
    with ShapeRules():
        args_on_meta, kwargs_on_meta = tree_map_only(torch.Tensor, lambda own: own.to("meta"), (args, kwargs))
        meta = func(*args_on_meta, **kwargs_on_meta)
    mode = fake_mode()
    with mode:
        fake = Ledger(kernels="cpu").run(func, *tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs)))
    for made in (meta, fake):
        assert (tuple(made.shape), made.dtype) == new
        assert made.is_contiguous()
    return new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("one", "other", "end"),
    [((8, 16), (2, 16, 32), 8), ((2, 8, 16), (16, 32), 32), ((8, 16), (16, 32), 16), ((2, 8, 16), (2, 16, 32), None)],
)
def test_grouped_products(one: tuple[int, ...], other: tuple[int, ...], end: int | None, dtype: torch.dtype) -> None:
    """They are those of the CPU's kernel."""
    left, right = torch.zeros(one, dtype=dtype), torch.zeros(other, dtype=dtype)
    kwargs = {} if end is None else {"offs": torch.tensor([4, end], dtype=torch.int32)}
    made = torch._grouped_mm(left, right, **kwargs)
    assert told(GROUPED_MM, [left, right], kwargs) == (tuple(made.shape), made.dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_histograms_of_integers(dtype: torch.dtype) -> None:
    assert told(HISTC, [torch.zeros(8, dtype=dtype)], {"bins": 4, "min": 0, "max": 3}) == ((4,), dtype)
