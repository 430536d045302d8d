"""What is timed to calibrate a GPU: the classes of `calibration_cases` in sizes that fill one.

A GPU is full at some hundred thousand elements and a thousand rows of a product; below that a kernel takes what its
start takes. So sizes go from there to what a large layer has: a gigabyte read, products of 8200, 15,000 tokens. As on
the CPU no shape is a family's, and what runs under autocast is timed in both precisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.profile.calibration_cases import Case, Program

_PRODUCTS = (
    (24, 176, 176),
    (120, 720, 200),
    (520, 520, 520),
    (1100, 3000, 640),
    (2100, 2100, 2100),
    (4200, 1100, 4500),
    (8200, 4200, 1100),
    (8200, 8200, 8200),
)
_ATTENTION = ((2, 6, 96, 48), (4, 10, 480, 64), (2, 18, 1100, 64), (1, 20, 4200, 128), (1, 8, 15000, 64))
_IMAGES = (
    (4, 24, 40, 60, 3, 1),
    (8, 80, 160, 44, 3, 2),
    (16, 160, 160, 30, 3, 1),
    (24, 320, 80, 28, 1, 1),
    (24, 80, 320, 60, 1, 1),
    (32, 3, 48, 200, 7, 2),
    (32, 480, 480, 15, 3, 1),
    (16, 48, 48, 180, 3, 1),
)
_LENGTHS = (1 << 10, 1 << 15, 3 << 17, 3 << 20, 5 << 22, 5 << 25)
_ROWS = ((48, 200), (500, 720), (3000, 1100), (9000, 3000), (17000, 5000))
_TABLES = ((700, 96, 130), (11000, 520, 2100), (45000, 1100, 8200))
_SEQUENCES = ((40, 4, 176), (90, 24, 520), (120, 60, 1100))


def cuda_cases() -> Iterator[Case]:
    """Yield every case; the quick ones are of middling size."""
    for rows, inner, outer in _PRODUCTS:
        quick = 100 < rows < 5000
        yield Case(f"dense {rows}x{inner}x{outer}", partial(_dense, rows, inner, outer), low=True, quick=quick)
        yield Case(f"batched {rows}x{inner}x{outer}", partial(_batched, rows, inner, outer), low=True, quick=quick)
    for heads in _ATTENTION:
        yield Case(f"attention {_by(heads)}", partial(_attention, *heads), low=True, quick=heads[2] < 2000)
    for image in _IMAGES:
        yield Case(f"convolution {_by(image)}", partial(_convolution, *image), low=True, quick=image[0] < 30)
    for steps in _SEQUENCES:
        yield Case(f"recurrent {_by(steps)}", partial(_recurrent, *steps), low=True, quick=steps[1] < 50)
    for length in _LENGTHS:
        quick = 1 << 12 < length < 1 << 24
        for name, make in (("elementwise", _elementwise), ("special", _special), ("copies", _copies)):
            yield Case(f"{name} {length}", partial(make, length), low=True, quick=quick)
        yield Case(f"dropout {length}", partial(_dropout, length), quick=quick)
    for rows, width in _ROWS:
        quick = 100 < rows < 10000
        yield Case(f"norms {rows}x{width}", partial(_norms, rows, width), low=True, quick=quick)
        yield Case(f"reductions {rows}x{width}", partial(_reductions, rows, width), low=True, quick=quick)
        yield Case(f"cross entropy {rows}x{width}", partial(_entropy, rows, width), low=True, quick=quick)
    for table in _TABLES:
        yield Case(f"embedding {_by(table)}", partial(_embedding, *table), quick=table[0] < 40000)


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def _with(module: nn.Module, *inputs: Tensor) -> tuple[Program, Sequence[Tensor]]:
    return lambda: module(*inputs), [*inputs, *module.parameters()]


def _dense(rows: int, inner: int, outer: int) -> tuple[Program, Sequence[Tensor]]:
    return _with(nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, inner)), _leaf(rows, inner))


def _batched(rows: int, inner: int, outer: int) -> tuple[Program, Sequence[Tensor]]:
    left, right = _leaf(12, -(-rows // 8), inner // 4), _leaf(12, inner // 4, outer // 4)
    return lambda: torch.bmm(left, right), [left, right]


def _attention(rows: int, heads: int, length: int, width: int) -> tuple[Program, Sequence[Tensor]]:
    entries = [_leaf(rows, length, heads, width) for _ in range(3)]

    def mix() -> Tensor:
        query, key, value = (entry.transpose(1, 2) for entry in entries)
        return F.scaled_dot_product_attention(query, key, value, is_causal=length % 3 == 0).transpose(1, 2)

    return mix, entries


def _convolution(
    rows: int, inner: int, outer: int, size: int, kernel: int, stride: int
) -> tuple[Program, Sequence[Tensor]]:
    layer = nn.Conv2d(inner, outer, kernel, stride=stride, padding=kernel // 2, bias=False)
    return _with(
        nn.Sequential(layer, nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)), _leaf(rows, inner, size, size)
    )


def _recurrent(steps: int, rows: int, width: int) -> tuple[Program, Sequence[Tensor]]:
    layer, x = nn.LSTM(width, width, batch_first=True), _leaf(rows, steps, width)
    return lambda: layer(x)[0], [x, *layer.parameters()]


def _elementwise(length: int) -> tuple[Program, Sequence[Tensor]]:
    x, y, scale = _leaf(length // 64, 64), _leaf(length // 64, 64), _leaf(64)
    return lambda: torch.where(x > 0, F.relu(x + y * scale - y.neg()) / 2.0, y), [x, y, scale]


def _special(length: int) -> tuple[Program, Sequence[Tensor]]:
    x = _leaf(length // 64, 64)
    return lambda: F.silu(F.gelu(x)).tanh().sigmoid(), [x]


def _copies(length: int) -> tuple[Program, Sequence[Tensor]]:
    x = _leaf(length // 64, 8, 8)

    def run() -> Tensor:
        turned = x.transpose(0, 1).contiguous()
        return torch.cat(turned.chunk(2, dim=-1)[::-1], dim=-1).permute(1, 0, 2).reshape(-1, 64)

    return run, [x]


def _dropout(length: int) -> tuple[Program, Sequence[Tensor]]:
    x = _leaf(length)
    return lambda: F.dropout(x, 0.1), [x]


def _norms(rows: int, width: int) -> tuple[Program, Sequence[Tensor]]:
    return _with(nn.Sequential(nn.LayerNorm(width), nn.Softmax(-1), nn.LayerNorm(width)), _leaf(rows, width))


def _reductions(rows: int, width: int) -> tuple[Program, Sequence[Tensor]]:
    x, bias = _leaf(rows, width), _leaf(width)
    return lambda: (x + bias) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) + x.amax(0), [x, bias]


def _entropy(rows: int, classes: int) -> tuple[Program, Sequence[Tensor]]:
    x, target = _leaf(rows, classes), torch.randint(0, classes, (rows,))
    return lambda: F.cross_entropy(x, target), [x]


def _embedding(words: int, width: int, count: int) -> tuple[Program, Sequence[Tensor]]:
    table, places = _leaf(words, width), torch.randint(0, words, (count,))
    return lambda: F.embedding(places, table), [table]
