"""Models so small that a step of them is issuing alone: what a step costs the host is what it takes.

net = nets()["gpt"]
model, rows = net.make(), net.batch(32)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Net:
    """A model and its batches; ``loss`` takes what the model returns."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    loss: Callable[[Any], Tensor]


class Block(nn.Module):
    """A block of a GPT, before its norms."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True).transpose(1, 2)
        x = x + self.drop(self.out(mixed.reshape(rows, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Twelve blocks; with ``tied`` the head's weight is the table's."""

    def __init__(self, *, blocks: int = 12, width: int = 8, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 17, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """A bottleneck of a ResNet."""

    def __init__(self, channels_in: int, inner: int, channels: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(channels_in, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.c2, self.b2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.c3, self.b3, self.act = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.skip = shortcut if channels_in != channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.b2(self.c2(self.act(self.b1(self.c1(x))))))
        return self.act(self.b3(self.c3(y)) + self.skip(x))


class ResNet(nn.Module):
    """The shape of a ResNet-50: 16 bottlenecks, 53 batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        widths = [4, *(8 + part for part, count in enumerate((3, 4, 6, 3)) for _ in range(count))]
        self.blocks = nn.Sequential(*(Bottleneck(a, 4, b) for a, b in pairwise(widths)))
        self.head = nn.Linear(widths[-1], 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Three levels of convolutions with GroupNorm, and skips between them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()

        def level(channels_in: int, channels: int) -> nn.Sequential:
            pairs = [(channels_in, channels), (channels, channels)]
            layers = [(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU()) for a, b in pairs]
            return nn.Sequential(*(layer for each in layers for layer in each))

        self.downs = nn.ModuleList(level(a, b) for a, b in ((3, width), (width, 2 * width)))
        self.bottom = level(2 * width, 4 * width)
        self.rises = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (2 * width, width))
        self.ups = nn.ModuleList(level(2 * c, c) for c in (2 * width, width))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for rise, up in zip(self.rises, self.ups, strict=True):
            x = up(torch.cat([rise(x), skips.pop()], 1))
        return self.head(x)


class Experts(nn.Module):
    """A dense mixture: every expert sees every token, weighted by a router."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        pairs = ((nn.Linear(width, 2 * width), nn.Linear(2 * width, width)) for _ in range(experts))
        self.experts = nn.ModuleList(nn.Sequential(up, nn.GELU(), down) for up, down in pairs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        return x + (torch.stack([expert(y) for expert in self.experts], -1) * weights.unsqueeze(-2)).sum(-1)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LlamaForCausalLM(config)


def _encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def _square(output: Any) -> Tensor:
    return getattr(output, "logits", output).square().mean()


def _tokens(words: int, length: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(words, (rows, length))


def _numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def nets() -> Mapping[str, Net]:
    """Return the models by name."""
    return {
        "gpt": Net(GPT, _tokens(17, 4), _square),
        "gpt, tied, dropout": Net(lambda: GPT(dropout=0.1, tied=True), _tokens(17, 4), _square),
        "resnet": Net(ResNet, _numbers(3, 4, 4), _square),
        "llama": Net(_llama, _tokens(64, 4), _square),
        "unet": Net(UNet, _numbers(3, 8, 8), _square),
        "encoder": Net(lambda: _encoder(0.0), _numbers(4, 8), _square),
        "encoder, dropout": Net(lambda: _encoder(0.1), _numbers(4, 8), _square),
        "experts": Net(lambda: nn.Sequential(*(Experts(8, 4) for _ in range(6))), _numbers(4, 8), _square),
    }
