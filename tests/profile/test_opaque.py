"""What kernels hold inside, against the CPU allocator's own events: operation by operation, and over whole steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.devices import Allocations
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.workspaces import true_results, workspace

HALF = torch.bfloat16


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def in_turn(*runs: Callable[[], Any]) -> None:
    for run in runs:
        out = run()
        torch.autograd.backward(out, torch.ones_like(out))


def layer(kind: type[nn.Module], *args: Any, on: tuple[int, ...], **kwargs: Any) -> Callable[[], Any]:
    made = kind(*args, **kwargs)

    def run() -> Any:
        out = made(torch.randn(on, requires_grad=True))
        return out[0] if isinstance(out, tuple) else out

    return run


LAYERS: dict[str, Callable[[], Callable[[], Any]]] = {
    "convolution": lambda: layer(nn.Conv2d, 24, 40, 3, padding=1, on=(4, 24, 20, 20)),
    "strided": lambda: layer(nn.Conv2d, 64, 64, 3, 2, 1, on=(2, 64, 20, 20)),
    "grouped": lambda: layer(nn.Conv2d, 24, 24, 3, groups=4, on=(2, 24, 20, 20)),
    "transposed": lambda: layer(nn.ConvTranspose2d, 24, 40, 2, 2, on=(3, 24, 10, 10)),
    "lstm": lambda: layer(nn.LSTM, 50, 60, 2, on=(9, 7, 50)),
    "batch norm": lambda: layer(nn.BatchNorm2d, 24, on=(4, 24, 20, 20)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_scratch_is_what_the_allocator_gives_out(name):
    run = LAYERS[name]()
    in_turn(run)
    with Allocations() as found:
        in_turn(run)
    with FakeTensorMode(), Ledger(kernels="cpu") as ledger:
        run = LAYERS[name]()
        in_turn(run)
        gc.collect()
        before = ledger.live_bytes
        ledger.open()
        in_turn(run)
    assert abs(ledger.peak_bytes - before - found.peak_bytes) <= 64


def test_a_reduced_loss_keeps_the_storage_of_its_terms():
    with Allocations() as found:
        loss = F.mse_loss(torch.ones(100, 50), torch.zeros(100, 50))
    assert found.left_bytes >= loss.untyped_storage().nbytes() == 100 * 50 * 4
    with FakeTensorMode():
        ones = torch.ones(100, 50)
        out = torch.ops.aten.mse_loss.default(ones, ones)
        kept = true_results(torch.ops.aten.mse_loss.default, (ones, ones), {}, out)
    assert kept.shape == ()
    assert kept.untyped_storage().nbytes() == 100 * 50 * 4


def cuda(name: str, *args, out=None):
    return workspace(getattr(torch.ops.aten, name).default, args, {}, out, target="cuda")


def test_cuda_flash_attention_sums_the_queries_gradient_in_fp32():
    q = torch.empty(2, 4, 130, 40, dtype=HALF, device="meta")
    found = cuda("_scaled_dot_product_flash_attention_backward", q, q, q)
    assert (found.bytes, found.source) == (4 * 2 * 4 * 256 * (64 + 1), "formula")
    few = torch.empty(2, 2, 130, 40, dtype=HALF, device="meta")
    more = cuda("_scaled_dot_product_flash_attention_backward", q, q, few)
    assert more.bytes - found.bytes == 2 * (2 * 4 * 130 * 40 * 2), "gradients of keys and values, per query head"


def test_cuda_kernels_that_nobody_measured_say_so():
    assert cuda("convolution_backward").source == "unknown"
    assert cuda("mm", torch.empty(2, 2), torch.empty(2, 2)) is None
    words = torch.zeros(5000, dtype=torch.long)
    assert cuda("embedding_dense_backward", torch.empty(5000, 8), words).source == "unknown"
    assert cuda("embedding_dense_backward", torch.empty(500, 8), words[:500]) is None
