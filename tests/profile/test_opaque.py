"""What kernels hold inside, against the CPU allocator's own events: operation by operation, and over whole steps."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.profile.allocations import Allocations
from autosplit.profile.ledger import Ledger
from autosplit.profile.opaque import true_results, workspace
from autosplit.profile.opaque_cuda import cublas_workspace_bytes
from benchmarks.workspaces import leaf, others, recurrences, table, watch

HALF = torch.bfloat16
AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    reason="oneDNN's blocks of bfloat16 were measured with AVX-512 and no AMX",
)
blocked = pytest.mark.skipif(
    not AVX2, reason="oneDNN's layouts were measured on AVX2; elsewhere they are tagged unknown"
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def convolve(*shape, kernel, stride=1, padding=0, groups=1, out=16, bias=True, transposed=False, dtype=torch.float32):
    make = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = make(shape[1], out, kernel, stride, padding, groups=groups, bias=bias, dtype=dtype)
    return [probe for probe in watch(lambda: layer(leaf(*shape, dtype=dtype))) if "convolution" in probe.operation]


@blocked
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 24, 20, 20), {"kernel": 3, "padding": 1, "out": 40}),
        ((4, 20, 15, 15), {"kernel": 3, "padding": 1, "out": 28}),
        ((4, 3, 32, 32), {"kernel": 16, "stride": 16, "out": 48}),
        ((4, 64, 16, 16), {"kernel": 1, "stride": 2, "out": 96, "bias": False}),
        ((4, 64, 16, 16), {"kernel": 1, "out": 32}),
        ((18, 64, 9, 9), {"kernel": 1, "out": 32}),
        ((2, 64, 20, 20), {"kernel": 3, "stride": 2, "padding": 1, "out": 64}),
        ((2, 64, 20, 20), {"kernel": 3, "padding": 1, "groups": 64, "out": 64}),
        ((2, 64, 20, 20), {"kernel": 3, "padding": 1, "groups": 4, "out": 64}),
        ((2, 24, 20, 20), {"kernel": 3, "padding": 1, "groups": 4, "out": 24}),
        ((3, 24, 10, 10), {"kernel": 2, "stride": 2, "out": 40, "transposed": True}),
        ((3, 24, 10, 10), {"kernel": 3, "padding": 1, "out": 40, "transposed": True}),
    ],
)
def test_convolutions_are_exact(shape, options, dtype):
    for probe in convolve(*shape, **options, dtype=dtype):
        assert probe.source == "formula"
        assert probe.off_bytes == 0, probe


@blocked
def test_scratch_grows_with_threads():
    torch.set_num_threads(2)
    found = convolve(2, 64, 16, 16, kernel=1, out=128)
    found += convolve(2, 512, 8, 8, kernel=1, out=128)
    found += convolve(2, 64, 20, 20, kernel=3, groups=32, out=64)
    found += convolve(2, 24, 20, 20, kernel=3, padding=1, out=40)
    assert all(probe.off_bytes <= 0.01 * probe.peak_bytes for probe in found), table(found)


@blocked
@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 18),
    size=st.integers(8, 24),
    source=st.integers(1, 40),
    target=st.integers(1, 40),
    kernel=st.sampled_from([1, 2, 3, 5, 7]),
    stride=st.sampled_from([1, 2]),
    bias=st.booleans(),
    half=st.booleans(),
)
def test_any_convolution_is_close(rows, size, source, target, kernel, stride, bias, half):
    """Within 5% of what it holds, where that is worth counting."""
    dtype = HALF if half else torch.float32
    shape = (rows, source, size, size)
    for probe in convolve(
        *shape, kernel=kernel, stride=stride, padding=kernel // 2, out=target, bias=bias, dtype=dtype
    ):
        assert probe.off_bytes <= max(0.05 * probe.peak_bytes, 40_000), probe


@blocked
def test_lstm_layers_are_exact():
    found = [probe for _, run in zip(range(4), recurrences(random.Random(3)), strict=False) for probe in watch(run)]
    layers = [probe for probe in found if "mkldnn_rnn_layer" in probe.operation]
    assert len(layers) >= 8
    assert all(probe.off_bytes == 0 for probe in layers), table(layers)


def test_lstm_without_gradients_is_exact():
    layer = nn.LSTM(50, 60)
    with torch.no_grad():
        (probe,) = [probe for probe in watch(lambda: layer(torch.randn(9, 7, 50))) if "rnn" in probe.operation]
    assert probe.off_bytes == 0 or not AVX2


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("seed", [1, 2])
def test_everything_else_is_within_two_percent(dtype, seed):
    found = [probe for run in others(random.Random(seed), dtype) for probe in watch(run)]
    told = [probe for probe in found if probe.source != "unknown"]
    bad = [probe for probe in told if probe.error > 0.02 and probe.peak_bytes > 4096]
    assert not bad, bad
    assert len(told) > 0.8 * len(found)


@pytest.mark.parametrize(
    ("capability", "dtype", "sources"),
    [("AVX2", HALF, {"none"}), ("AVX512", HALF, {"unknown"}), ("AVX512", torch.float32, {"none"})],
)
def test_products_in_blocks_are_guessed_where_onednn_makes_them(monkeypatch, capability, dtype, sources):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    left, right = torch.zeros(300, 200, dtype=dtype), torch.zeros(200, 100, dtype=dtype)
    found = watch(lambda: (left @ right, torch.stack([left] * 2) @ torch.stack([right] * 2)))
    found = [probe for probe in found if probe.operation in ("mm", "bmm")]
    assert {probe.source for probe in found} == sources
    assert all((probe.predicted_bytes > 0) == (probe.source == "unknown") for probe in found)


@avx512
@pytest.mark.parametrize("shape", [(64, 64, 64), (256, 1024, 256), (1024, 256, 1024), (4096, 512, 2048)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_in_blocks_hold_no_more_than_twice_the_guess(shape, turned):
    rows, inner, columns = shape
    left = torch.randn(inner, rows, dtype=HALF).t() if turned else torch.randn(rows, inner, dtype=HALF)
    right = torch.randn(inner, columns, dtype=HALF)
    (found,) = [probe for probe in watch(lambda: left @ right) if probe.operation == "mm"]
    assert 0 <= found.scratch_bytes <= 2 * found.predicted_bytes, found


def test_what_the_probes_found_is_printed():
    text = table(watch(lambda: F.mse_loss(leaf(100, 100), torch.zeros(100, 100))))
    assert "| mse_loss" in text
    assert "0.00%" in text


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


def step_of(model: nn.Module, batch: torch.Tensor, low: bool) -> None:
    with torch.autocast("cpu", HALF, enabled=low):
        out = model(batch)
        loss = F.mse_loss(out.float(), torch.zeros(out.shape))
    loss.backward()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(300, 40), nn.LSTM(40, 48, 2, batch_first=True)
        self.head = nn.Linear(48, 300)

    def forward(self, words):
        with torch.autocast("cpu", enabled=False):  # oneDNN has no LSTM in bf16 without AVX512
            steps = self.layer(self.table(words))[0]
        return self.head(steps)


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 64, 8, 8)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, images):
        return self.layer(self.cut(images).flatten(2).transpose(1, 2)).mean(1)


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 20, 7, 2, 3, bias=False), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(
            nn.Conv2d(20, 36, 1),
            nn.GroupNorm(4, 36),
            nn.SiLU(),
            nn.Conv2d(36, 40, 3, 1, 1),
            nn.BatchNorm2d(40),
            nn.ReLU(),
        ),
        *(nn.ConvTranspose2d(40, 24, 2, 2), nn.Upsample(scale_factor=2), nn.Conv2d(24, 4, 1)),
    )


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(96, 4, 384, dropout=0.1, batch_first=True)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutions": (convolutional, lambda: torch.randn(4, 3, 48, 48)),
    "lstm": (Words, lambda: torch.randint(0, 300, (6, 30))),
    "patches": (Patches, lambda: torch.randn(6, 3, 64, 64)),
    "transformer": (transformer, lambda: torch.randn(4, 60, 96)),
}


@blocked
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_a_whole_step_is_within_a_percent(name, low):
    make, batch = NETS[name]
    model, data = make(), batch()
    with Allocations() as found:
        step_of(model, data, low)
    with FakeTensorMode(), Ledger(kernels="cpu") as ledger:
        model, data = make(), batch()
        gc.collect()
        before = ledger.live_bytes
        ledger.open()
        step_of(model, data, low)
    predicted = ledger.peak_bytes - before
    assert abs(predicted / found.peak_bytes - 1) < 0.01, (predicted, found.peak_bytes)


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


@pytest.mark.parametrize(("capability", "count"), [((8, 0), 8_519_680), ((9, 0), 33_554_432), ((7, 5), 8_519_680)])
def test_cublas_keeps_a_workspace(capability, count):
    assert cublas_workspace_bytes(capability) == count
