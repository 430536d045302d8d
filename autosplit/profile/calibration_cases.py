"""Small modules whose operations are timed to calibrate a device: a grid of sizes for each class of work.

They copy no model: each takes the operations of one class forward and backward, alone or a few in a row, over sizes
from a core's cache to beyond the allocator's. Where a model would find its operands cold, a stack is deep enough that
this one does too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Program = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One module to time: ``build`` returns what computes its result, and the tensors to differentiate by.

    ``low`` cases also run in the low-precision dtype under autocast; ``quick`` ones make up the quick calibration.
    """

    name: str
    build: Callable[[], tuple[Program, Sequence[Tensor]]]
    low: bool = False
    quick: bool = False


def cases() -> Iterator[Case]:
    """Yield every case, in the order in which they are best run: short ones first in each class."""
    yield from _dense_cases()
    yield from _attention_cases()
    yield from _convolution_cases()
    yield from _recurrent_cases()
    yield from _elementwise_cases()
    yield from _row_cases()
    yield from _lookup_cases()
    yield from _stack_cases()


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def _with(module: nn.Module, *inputs: Tensor) -> tuple[Program, Sequence[Tensor]]:
    return lambda: module(*inputs), [*inputs, *module.parameters()]


def _dense_cases() -> Iterator[Case]:
    quick = {(16, 160, 160), (96, 320, 320), (320, 640, 640), (800, 320, 1280), (16, 640, 2560)}
    for rows, inner, outer in (
        (16, 160, 160),
        (4, 1600, 120),
        (16, 640, 2560),
        (96, 320, 320),
        (96, 1280, 320),
        (320, 160, 640),
        (1200, 320, 12),
        (320, 640, 640),
        (640, 640, 960),
        (320, 1280, 1280),
        (800, 320, 1280),
        (1600, 640, 160),
        (1600, 320, 2400),
        (300, 600, 6000),
    ):
        low = rows * inner * outer < 30e6

        def dense(rows: int = rows, inner: int = inner, outer: int = outer) -> tuple[Program, Sequence[Tensor]]:
            return _with(nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, inner)), _leaf(rows, inner))

        yield Case(f"dense {rows}x{inner}x{outer}", dense, low=low, quick=(rows, inner, outer) in quick)
    for rows, inner, classes in ((120, 160, 3000), (400, 320, 12000), (300, 200, 40000), (1200, 250, 11000)):

        def entropy(rows: int = rows, inner: int = inner, classes: int = classes) -> tuple[Program, Sequence[Tensor]]:
            head, target, x = nn.Linear(inner, classes), torch.randint(0, classes, (rows,)), _leaf(rows, inner)
            return lambda: F.cross_entropy(head(x), target), [x, *head.parameters()]

        yield Case(f"cross entropy {rows}x{inner}x{classes}", entropy, quick=classes <= 12000)
    for batch, rows, inner, outer in (
        (12, 96, 96, 96),
        (24, 160, 48, 160),
        (4, 200, 160, 320),
        (10, 240, 480, 400),
        (6, 480, 320, 640),
        (12, 360, 300, 800),
    ):

        def batched(
            batch: int = batch, rows: int = rows, inner: int = inner, outer: int = outer
        ) -> tuple[Program, Sequence[Tensor]]:
            left, right = _leaf(batch, rows, inner), _leaf(batch, inner, outer)
            return lambda: torch.bmm(left, right), [left, right]

        yield Case(f"batched {batch}x{rows}x{inner}x{outer}", batched, low=rows == 96, quick=rows < 480)


def _attention_cases() -> Iterator[Case]:
    for rows, heads, length, width in (
        (2, 4, 96, 48),
        (6, 5, 96, 80),
        (3, 6, 200, 40),
        (4, 8, 160, 64),
        (1, 10, 320, 64),
        (5, 4, 300, 56),
        (2, 12, 448, 64),
        (1, 6, 640, 96),
    ):

        def attention(
            rows: int = rows, heads: int = heads, length: int = length, width: int = width
        ) -> tuple[Program, Sequence[Tensor]]:
            entries = [_leaf(rows, length, heads, width) for _ in range(3)]
            causal = length % 3 == 0

            def mix() -> Tensor:
                query, key, value = (entry.transpose(1, 2) for entry in entries)
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
                return mixed.transpose(1, 2).reshape(rows, length, heads * width)

            return mix, entries

        yield Case(f"attention {rows}x{heads}x{length}x{width}", attention, low=length == 96, quick=length <= 200)


def _convolution_cases() -> Iterator[Case]:
    for rows, inner, outer, size, kernel, stride, groups in (
        (4, 80, 320, 20, 1, 1, 1),
        (4, 320, 80, 20, 1, 1, 1),
        (3, 40, 40, 56, 1, 1, 1),
        (2, 320, 1280, 7, 1, 1, 1),
        (3, 1280, 320, 6, 1, 1, 1),
        (2, 160, 640, 28, 1, 2, 1),
        (3, 640, 1280, 14, 1, 2, 1),
        (2, 16, 48, 96, 3, 1, 1),
        (3, 3, 24, 112, 3, 1, 1),
        (2, 48, 24, 96, 3, 1, 1),
        (4, 48, 96, 48, 3, 2, 1),
        (3, 96, 96, 28, 3, 1, 1),
        (2, 192, 96, 40, 3, 1, 1),
        (2, 160, 320, 14, 3, 1, 1),
        (3, 320, 320, 14, 3, 2, 1),
        (2, 640, 640, 7, 3, 1, 1),
        (3, 384, 384, 5, 3, 1, 1),
        (5, 448, 448, 6, 3, 2, 1),
        (3, 1536, 384, 4, 1, 1, 1),
        (3, 3, 48, 80, 5, 2, 1),
        (2, 3, 192, 96, 12, 12, 1),
    ):

        def convolution(
            rows: int = rows,
            inner: int = inner,
            outer: int = outer,
            size: int = size,
            kernel: int = kernel,
            stride: int = stride,
            groups: int = groups,
        ) -> tuple[Program, Sequence[Tensor]]:
            padding = kernel // 2 if stride <= 2 else 0
            first = nn.Conv2d(inner, outer, kernel, stride=stride, padding=padding, groups=groups, bias=stride > 2)
            return _with(
                nn.Sequential(first, nn.BatchNorm2d(outer), nn.ReLU(inplace=True)), _leaf(rows, inner, size, size)
            )

        name = f"convolution {rows}x{inner}x{outer}x{size} {kernel}/{stride}/{groups}"
        yield Case(name, convolution, low=size == 7 and kernel == 1, quick=size in (14, 20, 28))
    for rows, inner, size in ((2, 160, 20), (3, 48, 40), (2, 320, 10)):

        def transposed(rows: int = rows, inner: int = inner, size: int = size) -> tuple[Program, Sequence[Tensor]]:
            return _with(nn.ConvTranspose2d(inner, inner // 2, 2, stride=2), _leaf(rows, inner, size, size))

        yield Case(f"transposed convolution {rows}x{inner}x{size}", transposed, quick=size == 20)
    for rows, channels, size in ((2, 24, 48), (4, 48, 80), (3, 192, 20)):

        def pooled(rows: int = rows, channels: int = channels, size: int = size) -> tuple[Program, Sequence[Tensor]]:
            x = _leaf(rows, channels, size, size)
            return lambda: F.adaptive_avg_pool2d(F.max_pool2d(F.max_pool2d(x, 3, 2, 1), 2), 1), [x]

        yield Case(f"pooling {rows}x{channels}x{size}", pooled, quick=True)


def _recurrent_cases() -> Iterator[Case]:
    for steps, rows, width in ((40, 4, 160), (48, 16, 320), (160, 3, 320), (96, 6, 448), (64, 12, 640)):

        def recurrent(steps: int = steps, rows: int = rows, width: int = width) -> tuple[Program, Sequence[Tensor]]:
            layer, x = nn.LSTM(width, width, batch_first=True), _leaf(rows, steps, width)
            return lambda: layer(x)[0], [x, *layer.parameters()]

        yield Case(f"recurrent {steps}x{rows}x{width}", recurrent, quick=width < 600)


def _elementwise_cases() -> Iterator[Case]:
    for length in (1 << 8, 1 << 12, 3 << 14, 3 << 17, 3 << 19, 3 << 21, 5 << 21):
        depth = 4 if length < 1 << 20 else 2

        def mixed(length: int = length, depth: int = depth) -> tuple[Program, Sequence[Tensor]]:
            x, y, scale = _leaf(length // 64, 64), _leaf(length // 64, 64), _leaf(64)

            def run() -> Tensor:
                value = x
                for _ in range(depth):
                    value = value + y * scale
                    value = F.relu(value - y.neg()) / 2.0
                    value = torch.where(value > 0, value, y)
                return value

            return run, [x, y, scale]

        def special(length: int = length, depth: int = depth) -> tuple[Program, Sequence[Tensor]]:
            x = _leaf(length // 64, 64)

            def run() -> Tensor:
                value = x
                for _ in range(depth):
                    value = F.silu(F.gelu(value)).tanh().sigmoid()
                return value

            return run, [x]

        def dropped(length: int = length) -> tuple[Program, Sequence[Tensor]]:
            x = _leaf(length)
            return lambda: F.dropout(F.dropout(x, 0.1), 0.25), [x]

        def moved(length: int = length) -> tuple[Program, Sequence[Tensor]]:
            x = _leaf(length // 64, 8, 8)

            def run() -> Tensor:
                turned = x.transpose(0, 1).contiguous()
                front, back = turned.chunk(2, dim=-1)
                joined = torch.cat((back, front), dim=-1) + torch.stack((turned, turned)).sum(0)
                return joined.permute(1, 0, 2).reshape(-1, 64) + torch.zeros(length // 64, 64)

            return run, [x]

        quick = length in (1 << 12, 3 << 17, 3 << 19)
        yield Case(f"elementwise {length}", mixed, low=length < 1 << 20, quick=quick)
        yield Case(f"special {length}", special, low=length < 1 << 20, quick=quick)
        yield Case(f"dropout {length}", dropped, quick=quick)
        yield Case(f"copies {length}", moved, low=length < 1 << 20, quick=quick)


def _row_cases() -> Iterator[Case]:
    for rows, width in ((40, 160), (400, 160), (200, 960), (1600, 320), (1500, 1600), (4000, 1000)):

        def reduced(rows: int = rows, width: int = width) -> tuple[Program, Sequence[Tensor]]:
            x, bias = _leaf(rows, width), _leaf(width)

            def run() -> Tensor:
                shifted = x + bias
                scaled = shifted * torch.rsqrt(shifted.pow(2).mean(-1, keepdim=True) + 1e-5)
                return scaled.view(rows // 2, 2, width).sum(1) + shifted.amax(-1, keepdim=True)[: rows // 2]

            return run, [x, bias]

        def normed(rows: int = rows, width: int = width) -> tuple[Program, Sequence[Tensor]]:
            return _with(nn.Sequential(nn.LayerNorm(width), nn.Softmax(-1), nn.LayerNorm(width)), _leaf(rows, width))

        def grouped(rows: int = rows, width: int = width) -> tuple[Program, Sequence[Tensor]]:
            return _with(nn.GroupNorm(4, width // 10), _leaf(rows // 4, width // 10, 40))

        quick = rows in (400, 1600)
        yield Case(f"reductions {rows}x{width}", reduced, low=rows < 1000, quick=quick)
        yield Case(f"norms {rows}x{width}", normed, low=rows < 1000, quick=quick)
        yield Case(f"group norm {rows}x{width}", grouped, quick=quick)


def _lookup_cases() -> Iterator[Case]:
    for words, width, count in ((600, 96, 100), (2000, 160, 400), (12000, 320, 800), (30000, 400, 1200)):

        def embedded(words: int = words, width: int = width, count: int = count) -> tuple[Program, Sequence[Tensor]]:
            table, places = _leaf(words, width), torch.randint(0, words, (count,))
            return lambda: F.embedding(places, table), [table]

        def sorted_(width: int = width, count: int = count) -> tuple[Program, Sequence[Tensor]]:
            x, order = _leaf(count, width), torch.randperm(count)

            def run() -> Tensor:
                best, chosen = x.topk(2, dim=-1)
                counted = F.one_hot(chosen.flatten(), width).cumsum(0).sum(-1)
                taken = x[order] + x.new_zeros(count, width).index_copy(0, order, x)
                return taken.index_add(0, order, x) + best.sum(-1, keepdim=True) + counted[:count, None]

            return run, [x]

        yield Case(f"embedding {words}x{width}x{count}", embedded, quick=words < 20000)
        yield Case(f"places {count}x{width}", sorted_, quick=words < 20000)


class _Dense(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.05)


class _Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        gate, up = self.gate(scaled).chunk(2, dim=-1)
        return x + self.down(gate.sigmoid() * up)


class _Image(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.squeeze, self.mix = nn.Conv2d(width, inner, 1, bias=False), nn.Conv2d(inner, width, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(inner), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.mix(F.relu(self.first(self.squeeze(x))))))


def _stack_cases() -> Iterator[Case]:
    """Yield a few layers in a row, so that operands are as cold as they are in a model's backward."""
    for layer, rows, width, inner, depth in (
        (_Dense, 160, 224, 448, 6),
        (_Dense, 600, 288, 864, 6),
        (_Dense, 900, 448, 1344, 4),
        (_Gated, 240, 224, 352, 6),
        (_Gated, 700, 352, 800, 5),
    ):

        def stack(
            layer: type[nn.Module] = layer, rows: int = rows, width: int = width, inner: int = inner, depth: int = depth
        ) -> tuple[Program, Sequence[Tensor]]:
            return _with(nn.Sequential(*[layer(width, inner) for _ in range(depth)]), _leaf(rows, width))

        yield Case(f"stack {layer.__name__[1:].lower()} {rows}x{width}x{inner}", stack, quick=rows in (240, 600))
    for rows, width, inner, size in ((3, 72, 40, 36), (2, 40, 40, 72), (3, 224, 112, 12), (2, 448, 144, 6)):

        def images(
            rows: int = rows, width: int = width, inner: int = inner, size: int = size
        ) -> tuple[Program, Sequence[Tensor]]:
            layers = nn.Sequential(*[_Image(width, inner) for _ in range(4)])
            return _with(layers, _leaf(rows, width, size, size))

        yield Case(f"stack image {rows}x{width}x{inner}x{size}", images, quick=size in (12, 36))
