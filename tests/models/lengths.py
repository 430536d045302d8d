"""Models whose inputs have other lengths in every call, and batches for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.equality import Batch

WORDS = 29
LONGEST = 64


class Causal(nn.Module):
    """A decoder: positions by ``arange``, a slice of a mask buffer, attention by hand."""

    def __init__(self, width: int = 12, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.mixers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST).tril().bool())

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, S] to logits [B, S, words]."""
        rows, length = tokens.shape
        value = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        for mix, out, norm in zip(self.mixers, self.outs, self.norms, strict=True):
            q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in mix(norm(value)).chunk(3, -1))
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
            value = value + out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, -1))
        return self.head(value)


class Padded(nn.Module):
    """An encoder that takes a padding mask and gives a mean over the real tokens."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.register_buffer("positions", torch.arange(LONGEST)[None])
        self.places = nn.Embedding(LONGEST, width)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)  # the gradient of a bias would be zero, up to rounding
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        """Tokens [B, S] and a mask of real tokens to classes [B, 5] and states [B, S, width]."""
        value = self.words(tokens) + self.places(self.positions[:, : tokens.size(1)])
        mask = torch.ones_like(tokens) if mask is None else mask
        bias = (1.0 - mask[:, None, :].to(value.dtype)) * -1e4
        scores = self.query(value) @ self.key(value).transpose(1, 2) / value.shape[-1] ** 0.5 + bias
        value = value + self.out(scores.softmax(-1) @ self.value(value)) * scale
        weights = mask[..., None].to(value.dtype)
        return {"classes": self.head((value * weights).sum(1) / weights.sum(1)), "states": value}


class Relative(nn.Module):
    """Attention with a bias by distance from a table, as T5 has it, with buckets of distances."""

    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(5, width)
        self.table = nn.Embedding(17, heads)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 3)

    def forward(self, value: Tensor) -> Tensor:
        """[B, S, 5] to [B, S, 3]."""
        rows, length = value.shape[:2]
        places = torch.arange(length)
        distance = (places[None, :] - places[:, None]).clamp(-8, 8) + 8
        bias = self.table(distance).permute(2, 0, 1)[None]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.mix(self.inner(value)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(rows * length, -1)).view(rows, length, -1)


class Translator(nn.Module):
    """An encoder and a decoder with lengths of their own: cross attention, flattened tokens in the head."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 24, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """[B, S] and [B, T] to logits [B * T, words]."""
        memory = self.encoder(self.words(source))
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        value = self.decoder(self.words(target), memory, tgt_mask=causal)
        return self.head(value.reshape(-1, value.shape[-1]))


class Recurrent(nn.Module):
    """Two recurrent networks, one of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 7, batch_first=True)
        self.head = nn.Linear(7, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S] to [B, S, 4] and the last state."""
        value, (last, _) = self.lstm(self.words(tokens))
        value, _ = self.gru(value)
        return self.head(value), last[-1]


class Pictures(nn.Module):
    """Convolutions with strides on pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.body = nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] to classes and tokens."""
        value = F.max_pool2d(self.norm(self.stem(picture)).relu(), 2)
        value = self.body(value)
        tokens = value.flatten(2).transpose(1, 2)
        height, width = value.shape[-2:]
        grid = tokens.transpose(1, 2).reshape(-1, 8, height, width)
        return self.head(F.adaptive_avg_pool2d(grid, 1).flatten(1)), tokens * (1.0 / (height * width))


@dataclass(frozen=True)
class Case:
    """A model and a batch of given rows and lengths for it."""

    make: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    lengths: int = 1


def _tokens(rows: int, length: int) -> Tensor:
    return torch.randint(WORDS, (rows, length))


def _padded(rows: int, length: int) -> Batch:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 + 1 :] = 0
    return Batch((_tokens(rows, length),), {"mask": mask})


def _values(rows: int, length: int) -> Batch:
    return Batch((torch.randn(rows, length, 5, dtype=torch.float64).requires_grad_(),))


CASES: dict[str, Case] = {
    "causal": Case(Causal, lambda rows, length: Batch((_tokens(rows, length),))),
    "padded": Case(Padded, _padded),
    "relative": Case(Relative, _values),
    "translator": Case(Translator, lambda rows, s, t: Batch((_tokens(rows, s), _tokens(rows, t))), lengths=2),
    "recurrent": Case(Recurrent, lambda rows, length: Batch((_tokens(rows, length),))),
    "pictures": Case(
        Pictures,
        lambda rows, h, w: Batch((torch.randn(rows, 3, 2 * h + 5, 2 * w + 5, dtype=torch.float64),)),
        lengths=2,
    ),
}


def made(pipe: Any) -> int:
    """Return how often a pipe's model was recorded anew."""
    return pipe._core.recordings.made
