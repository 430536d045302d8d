"""The allocator's own events: known allocations give known numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autosplit.devices import Allocations, OperationMemory, _Event, _in_order
from tests.properties import examples

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def test_known_allocations_give_known_numbers():
    before = torch.empty(5000)
    with Allocations() as found:
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        third = torch.empty(500)
        del second, before
    assert found.changes == ((0, 4000), (1, 8000), (0, -4000), (2, 2000), (1, -8000))
    assert (found.peak_bytes, found.left_bytes) == (12000, 2000)
    del third


def left_by(found: Allocations, operation: OperationMemory) -> int:
    return sum(size for _, size in found.changes[operation.first : operation.last])


def test_scratch_inside_an_operation_is_seen():
    table = torch.randn(100, 8)
    with Allocations() as found:
        result = torch.linalg.vector_norm(table.half(), dim=1).sort()
    sort = next(op for op in found.operations if op.name == "aten::sort" and op.depth == 0)
    assert left_by(found, sort) == 100 * 2 + 100 * 8
    assert found.peak_bytes >= 100 * 8 * 2 + 100 * 2, "the halves live while the norm is taken"
    assert found.left_bytes == result.values.nbytes + result.indices.nbytes


def test_operations_nest_and_the_backward_is_there():
    model, batch = nn.Linear(64, 32), torch.randn(16, 64)
    with Allocations() as found:
        model(batch).sum().backward()
    by_name = {op.name: op for op in found.operations}
    linear = by_name["aten::linear"]
    assert (linear.depth, left_by(found, linear)) == (0, 16 * 32 * 4)
    assert by_name["aten::addmm"].depth == 1
    assert left_by(found, by_name["autograd::engine::evaluate_function: AddmmBackward0"]) >= 32 * 64 * 4
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    assert found.left_bytes == gradients


def test_an_address_used_again_is_another_block():
    with Allocations() as found:
        for _ in range(20):
            torch.empty(4096)
    assert [block for block, count in found.changes if count > 0] == list(range(20))
    assert found.peak_bytes == 4 * 4096


def test_blocks_of_an_earlier_recording_do_not_disturb():
    with Allocations():
        left = [torch.empty(777) for _ in range(30)]
    del left
    between = [torch.empty(333) for _ in range(60)]
    with Allocations() as found:
        del between
        fresh = torch.empty(10)
    assert (found.peak_bytes, found.left_bytes) == (fresh.nbytes, fresh.nbytes)


def test_an_error_inside_passes_and_the_next_recording_works():
    with pytest.raises(ZeroDivisionError), Allocations():
        _ = 1 / 0
    with Allocations() as found:
        torch.empty(10)
    assert found.peak_bytes == 40


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40, unique=True), st.randoms(use_true_random=False))
def test_ties_in_time_are_resolved_by_the_running_total(totals, random):
    events = [
        _Event(time_ns=0, pointer=index, bytes=after - before, total_bytes=after)
        for index, (before, after) in enumerate(pairwise(totals))
    ]
    rest = events[1:]
    random.shuffle(rest)
    assert _in_order([events[0], *rest]) == events
