from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import OpWork, Roofline, device
from cost_models.kernels import architecture, attention_share, product_share

SIDE = st.integers(1, 20_000)
H100 = device("H100-SXM5-80GB")


@given(st.tuples(st.integers(1, 64), SIDE, SIDE, SIDE), st.integers(0, 3), st.integers(1, 4096))
def test_a_larger_product_never_takes_less_time(sides, side, more):
    def time(sides):
        batch, rows, columns, inner = sides
        return batch * rows * columns * inner / product_share(sides, 132)

    larger = tuple(length + more * (place == side) for place, length in enumerate(sides))
    assert 0 < product_share(sides, 132) <= 1
    assert time(larger) >= time(sides) * (1 - 1e-9)


def test_one_tile_more_than_a_wave_takes_another_wave():
    full, over = (1, 132 * 256, 128, 8192), (1, 133 * 256, 128, 8192)
    assert product_share(full, 132) == pytest.approx(8192 / (8192 + 64))
    assert product_share(over, 132) < 0.9 * product_share(full, 132)


def test_small_products_reach_less_of_the_peak():
    shares = [product_share((1, size, size, size), 132) for size in (64, 512, 2048, 8192)]
    assert shares == sorted(shares)
    assert shares[0] < 0.02
    assert shares[-1] > 0.9


def test_attention_needs_long_rows_and_many_heads():
    assert attention_share((512, 512, 512, 128), 132) < attention_share((512, 8192, 8192, 128), 132)
    assert attention_share((1, 512, 512, 128), 132) < 0.05


def test_an_architecture_has_its_own_shares_with_sources():
    ampere, hopper = architecture("8.0"), architecture("9.0")
    assert hopper.arithmetic["matmul"] < ampere.arithmetic["matmul"]
    assert architecture("8.6") == ampere
    assert architecture("6.1").arithmetic == {}


def test_wider_heads_and_fp8_have_their_own_rates():
    def seconds(kind, dtype, width):
        work = OpWork(kind=kind, flops=10**12, bytes=0, dtype=dtype, launches=0, sides=(4096, 8192, 8192, width))
        return Roofline(H100).seconds(work)

    assert seconds("attention", "bf16", 64) > seconds("attention", "bf16", 128)
    known = architecture("9.0").arithmetic
    ratio = seconds("matmul", "bf16", 64) / seconds("matmul", "fp8", 64)
    assert ratio == pytest.approx(1979 / 989 * known["matmul.fp8"] / known["matmul"])
