"""Batch norms told by rule look as torch works them out, and those that the rule does not know are left to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.options import Sample
from autosplit.profile.blocks import CostMemo, block_costs
from autosplit.profile.fake import fake_costs
from autosplit.profile.ledger import Ledger
from autosplit.profile.quick_fake import QuickFake
from autosplit.trace.known_results import known_results
from autosplit.trace.ladder import trace
from tests.profile.test_quick_fake import looks

SHAPES = [(2, 3), (4, 3, 5), (2, 3, 4, 5), (1, 3, 2, 2, 2), (2, 1, 4, 4)]
FORWARD = torch.ops.aten.native_batch_norm.default
BACKWARD = torch.ops.aten.native_batch_norm_backward.default


def arguments(shape: tuple[int, ...], dtype: torch.dtype, *, affine: bool = True, training: bool = True) -> list[Any]:
    own = [torch.empty(shape[1], dtype=dtype) if affine else None for _ in range(4)]
    return [torch.empty(shape, dtype=dtype), *own, training, 0.1, 1e-5]


def backward_arguments(forward: list[Any], mask: list[bool]) -> list[Any]:
    given, (weight, _, mean, var), saved = forward[0], forward[1:5], torch.empty(forward[0].shape[1]).to(forward[0])
    return [torch.empty_like(given), given, weight, mean, var, saved, saved, forward[5], 1e-5, mask]


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_told_by_rule_they_look_as_torch_makes_them(
    shape: tuple[int, ...], dtype: torch.dtype, *, affine: bool
) -> None:
    with FakeTensorMode():
        forward = arguments(shape, dtype, affine=affine)
        assert known_results(FORWARD, forward, {}) is not None
        assert looks(QuickFake().run(FORWARD, forward, {})) == looks(FORWARD(*forward))
        for mask in ([True] * 3, [False, True, True], [True, False, False]):
            back = backward_arguments(forward, mask)
            assert (known_results(BACKWARD, back, {}) is not None) == mask[0]
            assert looks(QuickFake().run(BACKWARD, back, {})) == looks(BACKWARD(*back))


def in_eval(given: Tensor) -> list[Any]:
    return [given, *arguments(tuple(given.shape), given.dtype, training=False)[1:]]


def in_half(given: Tensor) -> list[Any]:
    return arguments(tuple(given.shape), torch.bfloat16)


def half_given_to_a_float_norm(given: Tensor) -> list[Any]:
    return [given.bfloat16(), *arguments(tuple(given.shape), torch.float32)[1:]]


def channels_last(given: Tensor) -> list[Any]:
    return [given.to(memory_format=torch.channels_last), *arguments(tuple(given.shape), given.dtype)[1:]]


def of_no_rows(given: Tensor) -> list[Any]:
    return [given[:0], *arguments(tuple(given.shape), given.dtype)[1:]]


@pytest.mark.parametrize("other", [in_eval, in_half, half_given_to_a_float_norm, channels_last, of_no_rows])
def test_others_are_left_to_torch(other: Any) -> None:
    with FakeTensorMode():
        args = other(torch.empty(2, 3, 4, 5))
        assert known_results(FORWARD, args, {}) is None
        assert looks(QuickFake().run(FORWARD, args, {})) == looks(FORWARD(*args))


class Net(nn.Module):
    """Repeated blocks with norms around ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(6))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Plain(Ledger):
    """Has torch work everything out."""

    def __init__(self, **choices: Any) -> None:
        super().__init__(**(choices | {"quick": None}))


def test_costs_of_several_sizes_with_one_memo_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(Net(), Sample(torch.zeros(4, 3, 8, 8))).graph
    memo = CostMemo()
    quick = [block_costs(graph, rows=rows, batch_rows=16, kernels="cuda", memo=memo) for rows in (1, 2, 4, 2)]
    assert quick[1] is quick[3]
    monkeypatch.setattr("autosplit.profile.fake.Ledger", Plain)
    for rows, found in zip((1, 2, 4), quick, strict=False):
        slow = fake_costs(graph, rows=rows, batch_rows=16, kernels="cuda").nodes
        assert found.nodes.keys() == slow.keys()
        for name, own in found.nodes.items():
            assert (own.forward_operations, own.backward_operations) == (
                slow[name].forward_operations,
                slow[name].backward_operations,
            )
            assert (own.output_bytes, own.forward_transient_bytes, own.backward_transient_bytes) == (
                slow[name].output_bytes,
                slow[name].forward_transient_bytes,
                slow[name].backward_transient_bytes,
            )
            assert sorted(own.saved.values()) == sorted(slow[name].saved.values())
