"""Small modules whose operations are timed to calibrate a device: a grid of sizes for each class of work.

They copy no model: each takes the operations of one class forward and backward, alone or a few in a row. On a CPU the
sizes go from a core's cache to beyond the allocator's; where a model would find its operands cold, a stack is deep
enough that this one does too. A GPU is full at some hundred thousand elements and a thousand rows of a product, and its
sizes go from there to a gigabyte read, products of 8200 and 15,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Program = Callable[[], Tensor]
Built = tuple[Program, Sequence[Tensor]]
Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """One module to time: ``build`` returns what computes its result, and the tensors to differentiate by.

    ``low`` cases also run in the low-precision dtype under autocast; ``quick`` ones make up the quick calibration.
    """

    name: str
    build: Callable[[], Built]
    low: bool = False
    quick: bool = False


@dataclass(frozen=True)
class _Grid:
    """One class of work in its sizes, short cases first: those in the middle are the quick ones.

    ``low``: how many of the first run in low precision too on a CPU, which may emulate it; on a GPU all do.
    """

    name: str
    build: Callable[..., Built]
    cpu: Sizes
    gpu: Sizes = ()
    low: int = 0

    def cases(self, *, gpu: bool) -> Iterator[Case]:
        sizes = self.gpu if gpu else self.cpu
        for index, size in enumerate(sizes):
            quick = 0 < index < len(sizes) - 1
            name = f"{self.name} {'x'.join(map(str, size))}"
            yield Case(name, partial(self.build, *size), low=gpu or index < self.low, quick=quick)


def cases(*, gpu: bool = False) -> Iterator[Case]:
    """Yield every case of a CPU or a GPU, in the order in which they are best run."""
    for grid in _grids():
        yield from grid.cases(gpu=gpu)


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def _with(module: nn.Module, *inputs: Tensor) -> Built:
    return lambda: module(*inputs), [*inputs, *module.parameters()]


def _dense(rows: int, inner: int, outer: int) -> Built:
    return _with(nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, inner)), _leaf(rows, inner))


def _batched(batch: int, rows: int, inner: int, outer: int) -> Built:
    left, right = _leaf(batch, rows, inner), _leaf(batch, inner, outer)
    return lambda: torch.bmm(left, right), [left, right]


def _attention(rows: int, heads: int, length: int, width: int) -> Built:
    entries = [_leaf(rows, length, heads, width) for _ in range(3)]

    def mix() -> Tensor:
        query, key, value = (entry.transpose(1, 2) for entry in entries)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=length % 3 == 0)
        return mixed.transpose(1, 2).reshape(rows, length, heads * width)

    return mix, entries


def _convolution(rows: int, inner: int, outer: int, size: int, kernel: int, stride: int) -> Built:
    padding = kernel // 2 if stride <= 2 else 0
    layer = nn.Conv2d(inner, outer, kernel, stride=stride, padding=padding, bias=stride > 2)
    return _with(nn.Sequential(layer, nn.BatchNorm2d(outer), nn.ReLU(inplace=True)), _leaf(rows, inner, size, size))


def _transposed(rows: int, inner: int, size: int) -> Built:
    return _with(nn.ConvTranspose2d(inner, inner // 2, 2, stride=2), _leaf(rows, inner, size, size))


def _pooled(rows: int, channels: int, size: int) -> Built:
    x = _leaf(rows, channels, size, size)
    return lambda: F.adaptive_avg_pool2d(F.max_pool2d(F.max_pool2d(x, 3, 2, 1), 2), 1), [x]


def _recurrent(steps: int, rows: int, width: int) -> Built:
    layer, x = nn.LSTM(width, width, batch_first=True), _leaf(rows, steps, width)
    return lambda: layer(x)[0], [x, *layer.parameters()]


def _elementwise(length: int) -> Built:
    x, y, scale = _leaf(length // 64, 64), _leaf(length // 64, 64), _leaf(64)

    def run() -> Tensor:
        value = x
        for _ in range(2):
            value = value + y * scale
            value = F.relu(value - y.neg()) / 2.0
            value = torch.where(value > 0, value, y)
        return value

    return run, [x, y, scale]


def _special(length: int) -> Built:
    x = _leaf(length // 64, 64)
    return lambda: F.silu(F.gelu(x)).tanh().sigmoid(), [x]


def _copies(length: int) -> Built:
    x = _leaf(length // 64, 8, 8)

    def run() -> Tensor:
        turned = x.transpose(0, 1).contiguous()
        front, back = turned.chunk(2, dim=-1)
        joined = torch.cat((back, front), dim=-1) + torch.stack((turned, turned)).sum(0)
        return joined.permute(1, 0, 2).reshape(-1, 64) + torch.zeros(length // 64, 64)

    return run, [x]


def _dropout(length: int) -> Built:
    x = _leaf(length)
    return lambda: F.dropout(F.dropout(x, 0.1), 0.25), [x]


def _norms(rows: int, width: int) -> Built:
    return _with(nn.Sequential(nn.LayerNorm(width), nn.Softmax(-1), nn.LayerNorm(width)), _leaf(rows, width))


def _group_norm(rows: int, channels: int) -> Built:
    return _with(nn.GroupNorm(4, channels), _leaf(rows, channels, 40))


def _reductions(rows: int, width: int) -> Built:
    x, bias = _leaf(rows, width), _leaf(width)

    def run() -> Tensor:
        shifted = x + bias
        scaled = shifted * torch.rsqrt(shifted.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.view(rows // 2, 2, width).sum(1) + shifted.amax(-1, keepdim=True)[: rows // 2]

    return run, [x, bias]


def _entropy(rows: int, inner: int, classes: int) -> Built:
    head, target, x = nn.Linear(inner, classes), torch.randint(0, classes, (rows,)), _leaf(rows, inner)
    return lambda: F.cross_entropy(head(x), target), [x, *head.parameters()]


def _embedding(words: int, width: int, count: int) -> Built:
    table, places = _leaf(words, width), torch.randint(0, words, (count,))
    return lambda: F.embedding(places, table), [table]


def _places(count: int, width: int) -> Built:
    x, order = _leaf(count, width), torch.randperm(count)

    def run() -> Tensor:
        best, chosen = x.topk(2, dim=-1)
        counted = F.one_hot(chosen.flatten(), width).cumsum(0).sum(-1)
        taken = x[order] + x.new_zeros(count, width).index_copy(0, order, x)
        return taken.index_add(0, order, x) + best.sum(-1, keepdim=True) + counted[:count, None]

    return run, [x]


class _Dense(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.05)


class _Image(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.squeeze, self.mix = nn.Conv2d(width, inner, 1, bias=False), nn.Conv2d(inner, width, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(inner), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.mix(F.relu(self.first(self.squeeze(x))))))


def _stack(rows: int, width: int, inner: int) -> Built:
    """A few layers in a row, so that operands are as cold as they are in a model's backward."""
    return _with(nn.Sequential(*[_Dense(width, inner) for _ in range(5)]), _leaf(rows, width))


def _images(rows: int, width: int, inner: int, size: int) -> Built:
    return _with(nn.Sequential(*[_Image(width, inner) for _ in range(4)]), _leaf(rows, width, size, size))


_CPU_PRODUCTS = (
    *((16, 160, 160), (4, 1600, 120), (96, 320, 320), (16, 640, 2560), (320, 160, 640), (96, 1280, 320)),
    *((320, 640, 640), (800, 320, 1280), (640, 640, 960), (320, 1280, 1280), (1600, 640, 160), (300, 600, 6000)),
)
_GPU_PRODUCTS = (
    *((24, 176, 176), (120, 720, 200), (520, 520, 520), (1100, 3000, 640)),
    *((2100, 2100, 2100), (4200, 1100, 4500), (8200, 4200, 1100), (8200, 8200, 8200)),
)
_CPU_IMAGES = (
    *((2, 160, 320, 14, 3, 1), (2, 320, 1280, 7, 1, 1), (4, 80, 320, 20, 1, 1), (2, 160, 640, 28, 1, 2)),
    *((3, 96, 96, 28, 3, 1), (3, 3, 48, 80, 5, 2), (4, 48, 96, 48, 3, 2), (3, 3, 24, 112, 3, 1)),
    *((2, 640, 640, 7, 3, 1), (3, 40, 40, 56, 1, 1), (5, 448, 448, 6, 3, 2), (2, 48, 24, 96, 3, 1)),
    *((2, 192, 96, 40, 3, 1), (2, 3, 192, 96, 12, 12)),
)
_GPU_IMAGES = (
    *((4, 24, 40, 60, 3, 1), (8, 80, 160, 44, 3, 2), (16, 160, 160, 30, 3, 1), (24, 320, 80, 28, 1, 1)),
    *((24, 80, 320, 60, 1, 1), (32, 480, 480, 15, 3, 1), (16, 48, 48, 180, 3, 1), (32, 3, 48, 200, 7, 2)),
)
_CPU_LENGTHS = tuple((length,) for length in (1 << 8, 1 << 12, 3 << 14, 3 << 17, 3 << 19, 3 << 21, 5 << 21))
_GPU_LENGTHS = tuple((length,) for length in (1 << 10, 1 << 15, 3 << 17, 3 << 20, 5 << 22, 5 << 25))
_CPU_ROWS = ((40, 160), (400, 160), (200, 960), (1600, 320), (1500, 1600), (4000, 1000))
_GPU_ROWS = ((48, 200), (500, 720), (3000, 1100), (9000, 3000), (17000, 5000))


def _grids() -> tuple[_Grid, ...]:
    return (
        _Grid("dense", _dense, _CPU_PRODUCTS, _GPU_PRODUCTS, low=5),
        _Grid(
            "batched",
            _batched,
            ((12, 96, 96, 96), (24, 160, 48, 160), (4, 200, 160, 320), (10, 240, 480, 400), (6, 480, 320, 640)),
            ((12, 65, 130, 130), (12, 140, 750, 160), (12, 525, 275, 1125), (12, 1025, 2050, 2050)),
            low=1,
        ),
        _Grid(
            "attention",
            _attention,
            ((2, 4, 96, 48), (6, 5, 96, 80), (3, 6, 200, 40), (4, 8, 160, 64), (1, 10, 320, 64), (2, 12, 448, 64)),
            ((2, 6, 96, 48), (4, 10, 480, 64), (2, 18, 1100, 64), (1, 20, 4200, 128), (1, 8, 15000, 64)),
            low=2,
        ),
        _Grid("convolution", _convolution, _CPU_IMAGES, _GPU_IMAGES, low=2),
        _Grid("transposed", _transposed, ((2, 160, 20), (3, 48, 40), (2, 320, 10))),
        _Grid("pooling", _pooled, ((2, 24, 48), (3, 192, 20), (4, 48, 80)), ((16, 48, 180), (32, 160, 60))),
        _Grid(
            "recurrent",
            _recurrent,
            ((40, 4, 160), (48, 16, 320), (160, 3, 320), (96, 6, 448), (64, 12, 640)),
            ((40, 4, 176), (90, 24, 520), (120, 60, 1100)),
        ),
        _Grid("elementwise", _elementwise, _CPU_LENGTHS, _GPU_LENGTHS, low=4),
        _Grid("special", _special, _CPU_LENGTHS, _GPU_LENGTHS, low=4),
        _Grid("copies", _copies, _CPU_LENGTHS, _GPU_LENGTHS, low=4),
        _Grid("dropout", _dropout, _CPU_LENGTHS, _GPU_LENGTHS),
        _Grid("norms", _norms, _CPU_ROWS, _GPU_ROWS, low=3),
        _Grid("reductions", _reductions, _CPU_ROWS, _GPU_ROWS, low=3),
        _Grid("group norm", _group_norm, ((10, 16), (50, 96), (400, 32), (1000, 100)), ((500, 96), (4000, 320))),
        _Grid(
            "cross entropy",
            _entropy,
            ((120, 160, 3000), (400, 320, 12000), (1200, 250, 11000)),
            ((500, 200, 720), (3000, 520, 5100), (9000, 1100, 33000)),
        ),
        _Grid(
            "embedding",
            _embedding,
            ((600, 96, 100), (2000, 160, 400), (12000, 320, 800), (30000, 400, 1200)),
            ((700, 96, 130), (11000, 520, 2100), (45000, 1100, 8200)),
        ),
        _Grid(
            "places", _places, ((100, 96), (400, 160), (800, 320), (1200, 400)), ((700, 130), (2100, 520), (8200, 1100))
        ),
        _Grid("stack", _stack, ((160, 224, 448), (600, 288, 864), (900, 448, 1344), (240, 352, 800))),
        _Grid("images", _images, ((2, 448, 144, 6), (3, 224, 112, 12), (3, 72, 40, 36), (2, 40, 40, 72))),
    )
