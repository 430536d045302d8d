"""Three networks in plain torch that are no transformers: ResNet-50, U-Net and an LSTM, each a chain of parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.family_transformers import Chain


def normed(channels_in: int, channels_out: int, size: int, *, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias that keeps the size, and its batch norm."""
    convolution = nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))


class Stem(nn.Module):
    """ResNet's first layers: a 7x7 convolution and a pooling, each halving the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.pool = normed(3, channels, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(F.relu(self.convolution(images), inplace=True))


class Bottleneck(nn.Module):
    """ResNet-50's block: 1x1, 3x3, 1x1, with a projection where the shape changes (He et al. 2016)."""

    def __init__(self, channels_in: int, inner: int, *, stride: int) -> None:
        super().__init__()
        channels_out = 4 * inner
        self.squeeze, self.mix = normed(channels_in, inner, 1), normed(inner, inner, 3, stride=stride)
        self.widen = normed(inner, channels_out, 1)
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = normed(channels_in, channels_out, 1, stride=stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.squeeze(x), inplace=True)
        inner = F.relu(self.mix(inner), inplace=True)
        return F.relu(self.widen(inner) + self.shortcut(x), inplace=True)


class PooledHead(nn.Module):
    """The mean over the image, and logits."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet50() -> Chain:
    """Return ResNet-50 with 100 classes."""
    blocks: list[nn.Module] = []
    channels = 64
    for inner, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(depth):
            blocks.append(Bottleneck(channels, inner, stride=stride if place == 0 else 1))
            channels = 4 * inner
    return Chain(Stem(64), *blocks, PooledHead(channels, 100))


class DoubleConvolution(nn.Module):
    """U-Net's block: two 3x3 convolutions, each with batch norm and ReLU (Ronneberger et al. 2015)."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first, self.second = normed(channels_in, channels_out, 3), normed(channels_out, channels_out, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x), inplace=True)), inplace=True)


class Down(nn.Module):
    """A level on the way down: what it computes goes on, and stays as a skip unless it is the lowest."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        pool: bool,
        keeps: bool = True,
        block: Callable[[int, int], nn.Module] = DoubleConvolution,
    ) -> None:
        super().__init__()
        self.pool, self.keeps = nn.MaxPool2d(2) if pool else nn.Identity(), keeps
        self.block = block(channels_in, channels_out)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        result = self.block(self.pool(x))
        return (result, result, *skips) if self.keeps else (result, *skips)


class Up(nn.Module):
    """A level on the way up: twice the size, beside the skip of that size."""

    def __init__(
        self, channels_in: int, channels_out: int, *, block: Callable[[int, int], nn.Module] = DoubleConvolution
    ) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2)
        self.block = block(2 * channels_out, channels_out)

    def forward(self, x: Tensor, skip: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return self.block(torch.cat((skip, self.widen(x)), dim=1)), *skips


def unet() -> Chain:
    """Return a U-Net of four levels and a bottom, with one mask of 21 classes."""
    widths = (32, 64, 128, 256)
    down = [Down(3 if not i else widths[i - 1], width, pool=i > 0) for i, width in enumerate(widths)]
    up = [Up(2 * width, width) for width in reversed(widths)]
    bottom = Down(widths[-1], 2 * widths[-1], pool=True, keeps=False)
    return Chain(*down, bottom, *up, nn.Conv2d(widths[0], 21, 1))


class Recurrent(nn.Module):
    """One LSTM layer over batch-first steps, and dropout on what it returns.

    The layer runs in fp32 under autocast too: the CPU's bf16 kernel needs AVX-512 and raises where there is none.
    """

    def __init__(self, width: int, hidden: int, *, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = nn.LSTM(width, hidden, batch_first=True), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
            steps, _ = self.layer(x.float())
        return self.dropout(steps)


class WordsIn(nn.Module):
    """A word embedding and dropout."""

    def __init__(self, words: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.word, self.dropout = nn.Embedding(words, width), nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.word(tokens))


def lstm() -> Chain:
    """Return a language model of two LSTM layers."""
    layers = [Recurrent(512, 512, dropout=0.2) for _ in range(2)]
    return Chain(WordsIn(8192, 512, dropout=0.2), *layers, nn.Linear(512, 8192))
