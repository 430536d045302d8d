"""The account of storages and the formulas behind it, on fake and on real tensors."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.profile.node_costs.ledger import Ledger

KIB = 1024


@pytest.mark.parametrize("fake", [True, False])
def test_storages_live_from_their_operation_to_their_release(fake):
    with FakeTensorMode() if fake else contextlib.nullcontext(), Ledger() as ledger:
        first = torch.zeros(256)
        view = first.view(16, 16)[2:]
        assert ledger.live_bytes == KIB
        second = first + 1
        assert (ledger.live_bytes, ledger.peak_bytes) == (2 * KIB, 2 * KIB)
        del second
        assert (ledger.live_bytes, ledger.peak_bytes) == (KIB, 2 * KIB)
        ledger.open()
        assert ledger.peak_bytes == KIB
        del first
        assert ledger.live_bytes == KIB, "the view holds the storage"
        del view
        assert ledger.live_bytes == 0


def test_operations_say_what_they_move():
    with FakeTensorMode(), Ledger() as ledger:
        left, right = torch.empty(4, 8), torch.empty(8, 2)
        ledger.open()
        product = left @ right
        product.t()[0].detach()
    (operation,) = ledger.operations
    assert (operation.name, operation.flops, operation.dtype) == ("mm", 2 * 4 * 8 * 2, torch.float32)
    assert operation.bytes == 4 * (4 * 8 + 8 * 2 + 4 * 2)


def flops_of(run) -> int:
    with FakeTensorMode(), torch.no_grad(), Ledger() as ledger:
        run()
    return sum(operation.flops for operation in ledger.operations)


def test_grouped_products_count_each_row_once():
    rows = flops_of(
        lambda: torch._grouped_mm(
            torch.empty(32, 16, dtype=torch.bfloat16),
            torch.empty(2, 16, 48, dtype=torch.bfloat16),
            torch.empty(2, dtype=torch.int32),
        )
    )
    assert rows == 2 * 32 * 16 * 48
