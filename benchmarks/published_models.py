"""The networks of torchgpipe's memory benchmarks: a U-Net (B, C) and AmoebaNet-D (L, D), as chains of layers.

Definitions of our own of what ``benchmarks/models`` of github.com/kakaobrain/torchgpipe describes (AmoebaNet-D: Real et
al. 2019, arXiv 1802.01548). They agree with it in parameters and in the number of layers of the chain, by which
torchgpipe states where it cuts. Only shapes matter: build them on ``meta``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DEPTH = 5
_NORMAL = ("1 conv", "1 avg", "1 same", "0 wide", "0 conv", "0 wide", "2 avg", "2 same", "1 avg", "5 conv")
_REDUCTION = ("0 max", "0 avg", "2 same", "1 deep", "2 wide", "2 avg", "3 same", "1 max", "2 avg", "3 conv")
_NORMAL_JOINS, _REDUCTION_JOINS = (0, 3, 4, 6), (4, 5, 6)
"""Which states a cell joins. What torchgpipe calls ``max_pool_3x3`` is an average, too."""


class Chain(nn.Module):
    """Layers in a row; some put their value aside, to be joined to the input of a later one."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, value: Tensor) -> Tensor:
        state: tuple[Tensor, ...] = (value,)
        for layer in self.layers:
            result = layer(*state)
            state = result if isinstance(result, tuple) else (result,)
        return state[0]


# -- U-Net -------------------------------------------------------------------------------------------------------------
class _Aside(nn.Module):
    """Put the value on the pile of skips as well."""

    def forward(self, value: Tensor, *pile: Tensor) -> tuple[Tensor, ...]:
        return (value, *pile, value)


class _Join(nn.Module):
    """Join the latest skip of the pile to the value."""

    def forward(self, value: Tensor, *pile: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat((value, pile[-1]), dim=1), *pile[:-1])


class _Beside(nn.Module):
    """A layer that leaves the pile of skips alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor, *pile: Tensor) -> tuple[Tensor, ...]:
        return (self.layer(value), *pile)


def unet(*, convolutions: int, channels: int) -> Chain:
    """Return U-Net (B, C): five levels down and up, ``convolutions`` in each, ``channels`` at the top."""
    widths = [channels * 2**level for level in range(_DEPTH)]
    layers: list[nn.Module] = []
    entering = 3
    for width in widths:
        layers += [*_stack(entering, width, width, convolutions), _Aside(), _Beside(nn.MaxPool2d(2))]
        entering = width
    layers += _stack(entering, 2 * entering, entering, convolutions)
    for width in reversed(widths):
        layers += [_Beside(nn.Upsample(scale_factor=2)), _Join()]
        layers += _stack(2 * width, width // 2, width // 2, convolutions)
    return Chain([*layers, nn.Conv2d(channels // 2, 1, 1, bias=False)])


def _stack(entering: int, inner: int, leaving: int, count: int) -> list[nn.Module]:
    widths = [entering, *[inner] * (count - 1), leaving]
    return [_Beside(layer) for pair in itertools.pairwise(widths) for layer in _convolution(*pair)]


def _convolution(entering: int, leaving: int) -> list[nn.Module]:
    return [
        nn.Conv2d(entering, leaving, 3, padding=1, bias=False),
        nn.Dropout2d(0.1),
        nn.InstanceNorm2d(leaving),
        nn.LeakyReLU(0.01),
    ]


# -- AmoebaNet-D -------------------------------------------------------------------------------------------------------
def amoebanet(*, layers: int, filters: int) -> Chain:
    """Return AmoebaNet-D (L, D) for images of 224 x 224 in 1000 classes."""
    width = filters // 4
    before = entering = width
    was_reduction = False
    chain: list[nn.Module] = [_normed(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False))]
    for reduction in [True, True, *(([False] * (layers // 3) + [True]) * 3)[:-1]]:
        width *= 2 if reduction else 1
        chain.append(_Cell(before, entering, width, reduction=reduction, was_reduction=was_reduction))
        before, entering = entering, width * len(_REDUCTION_JOINS if reduction else _NORMAL_JOINS)
        was_reduction = reduction
    return Chain([*chain, _Classify(entering)])


class _Cell(nn.Module):
    """One cell: five sums of two operations each on earlier states; some of the states are joined."""

    def __init__(self, before: int, entering: int, width: int, *, reduction: bool, was_reduction: bool) -> None:
        super().__init__()
        self.reduce_entering = _normed(nn.Conv2d(entering, width, 1, bias=False))
        self.reduce_before: nn.Module = nn.Identity()
        if was_reduction:
            self.reduce_before = _Halved(before, width)
        elif before != width:
            self.reduce_before = _normed(nn.Conv2d(before, width, 1, bias=False))
        genes = [gene.split() for gene in (_REDUCTION if reduction else _NORMAL)]
        self.sources = tuple(int(source) for source, _ in genes)
        strides = [2 if reduction and source in (0, 1) else 1 for source in self.sources]
        self.operations = nn.ModuleList(
            [_operation(kind, width, stride) for (_, kind), stride in zip(genes, strides, strict=True)]
        )
        self.joins = _REDUCTION_JOINS if reduction else _NORMAL_JOINS

    def forward(self, entering: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        states = [self.reduce_entering(entering), self.reduce_before(entering if before is None else before)]
        for place in range(0, len(self.sources), 2):
            one, two = (self.operations[at](states[self.sources[at]]) for at in (place, place + 1))
            states.append(one + two)
        return torch.cat([states[at] for at in self.joins], dim=1), entering


class _Halved(nn.Module):
    """Half the height and width: two strided projections, one of them shifted by a pixel."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(entering, leaving // 2, 1, stride=2, bias=False)
        self.two = nn.Conv2d(entering, leaving // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(leaving)

    def forward(self, value: Tensor) -> Tensor:
        value = F.relu(value)
        shifted = F.pad(value[:, :, 1:, 1:], (0, 1, 0, 1))
        result: Tensor = self.norm(torch.cat([self.one(value), self.two(shifted)], dim=1))
        return result


class _Classify(nn.Module):
    def __init__(self, entering: int) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(entering, 1000))

    def forward(self, entering: Tensor, before: Tensor) -> Tensor:
        result: Tensor = self.head(entering)
        return result


def _normed(*convolutions: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(*[part for c in convolutions for part in (nn.ReLU(), c, nn.BatchNorm2d(c.out_channels))])


def _operation(kind: str, width: int, stride: int) -> nn.Module:
    quarter = width // 4
    if kind == "same":
        return nn.Identity() if stride == 1 else _Halved(width, width)
    if kind == "avg":
        return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
    if kind == "max":
        return nn.MaxPool2d(2, stride=stride)
    if kind == "conv":
        return _normed(nn.Conv2d(width, width, 1, stride=stride, bias=False))
    enter, leave = nn.Conv2d(width, quarter, 1, bias=False), nn.Conv2d(quarter, width, 1, bias=False)
    if kind == "deep":
        return _normed(enter, nn.Conv2d(quarter, quarter, 3, stride=stride, padding=1, bias=False), leave)
    row = nn.Conv2d(quarter, quarter, (1, 7), stride=(1, stride), padding=(0, 3), bias=False)
    column = nn.Conv2d(quarter, quarter, (7, 1), stride=(stride, 1), padding=(3, 0), bias=False)
    return _normed(enter, row, column, leave)
