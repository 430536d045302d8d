"""The transformers of published layouts, by name: decoders whose shapes their configurations have. For meta.

Shapes: GPT of Megatron-LM's SC21 table (in the data file), GPT of NeMo's ``conf/gpt3`` (5B, 20B, 175B, dropout too:
NVIDIA/NeMo-Framework-Launcher, Apache-2.0, ``launcher_scripts/conf/training/gpt3/5b.yaml``), Nemotron of NeMo's
``collections/llm/gpt/model/nemotron.py``, Llama of its model cards; rotary positions are left out. Attention is
torch's fused one, as H100 runs have it; runs of 2021 and 2022 had a plain one, whose core a selective recompute makes
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A decoder: ``inner`` is the width of the MLP, ``gated`` gives it a third product, as in SwiGLU."""

    layers: int
    width: int
    heads: int
    words: int
    length: int
    groups: int | None = None
    inner: int | None = None
    gated: bool = False
    norm: str = "layer"
    bias: bool = True
    dropout: float = 0.0
    plain: bool = False
    activation: str = "gelu"

    def at(self, length: int) -> Shape:
        """Return the shape for another length of rows."""
        return replace(self, length=length)

    def step_flops(self, rows: int, *, again: bool) -> float:
        """Return the FLOPs of a step of GPT as Narayanan et al. 2021 (arXiv 2104.04473, equation 3) count them.

        ``again``: with the forward that a full recompute makes.
        """
        each = 96 if again else 72
        tokens, width = rows * self.length, self.width
        last = self.words / ((16 if again else 12) * self.layers * width)
        return each * tokens * self.layers * width**2 * (1 + self.length / (6 * width) + last)


def gpt(layers: int, width: int, heads: int, words: int = 51200, length: int = 2048, **more: object) -> Shape:
    """Return a GPT with words that the head does not share."""
    return Shape(layers, width, heads, words, length, **more)  # type: ignore[arg-type]


def llama(layers: int, width: int, heads: int, groups: int, inner: int, words: int) -> Shape:
    """Return a Llama: grouped queries, SwiGLU, RMS norms, no biases."""
    return Shape(
        layers, width, heads, words, 4096, groups, inner, gated=True, norm="rms", bias=False, activation="swiglu"
    )


def nemotron(layers: int, width: int, heads: int, groups: int) -> Shape:
    """Return a Nemotron: squared ReLU, no biases, 256,000 words."""
    return Shape(layers, width, heads, 256000, 4096, groups, 4 * width, bias=False, activation="relu2")


SHAPES = {
    "GPT3-5B": gpt(24, 4096, 32, dropout=0.1),
    "GPT3-20B": gpt(44, 6144, 48, dropout=0.1),
    "GPT3-175B": gpt(96, 12288, 96, dropout=0.1),
    "Llama2-7B": llama(32, 4096, 32, 32, 11008, 32000),
    "Llama2-13B": llama(40, 5120, 40, 40, 13824, 32000),
    "Llama2-70B": llama(80, 8192, 64, 8, 28672, 32000),
    "Llama3-8B": llama(32, 4096, 32, 8, 14336, 128256),
    "Llama3-70B": llama(80, 8192, 64, 8, 28672, 128256),
    "Llama3.1-70B": llama(80, 8192, 64, 8, 28672, 128256),
    "Llama3.1-405B": llama(126, 16384, 128, 8, 53248, 128256),
    "Nemotron-8B": nemotron(32, 4096, 32, 32),
    "Nemotron-22B": nemotron(40, 6144, 48, 48),
    "Nemotron-340B": nemotron(96, 18432, 96, 8),
}


class Core(nn.Module):
    """Attention of queries, keys and values: plain products and a softmax, or torch's fused one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.plain, self.scale, self.dropout = shape.plain, (shape.width // shape.heads) ** -0.5, shape.dropout
        self.grouped = shape.groups not in (None, shape.heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.plain:
            p = self.dropout if self.training else 0.0
            return F.scaled_dot_product_attention(query, key, value, None, p, is_causal=True, enable_gqa=self.grouped)
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        return F.dropout(scores, self.dropout, self.training) @ value


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        groups = shape.groups or shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.key, self.value = (nn.Linear(shape.width, groups * self.head, bias=shape.bias) for _ in range(2))
        self.core = Core(shape)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, value: Tensor) -> Tensor:
        parts = (product(value).unflatten(-1, (-1, self.head)) for product in (self.query, self.key, self.value))
        mixed = self.core(*(part.transpose(1, 2) for part in parts))
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.inner or 4 * shape.width
        self.up = nn.Linear(shape.width, inner * (1 + shape.gated), bias=shape.bias)
        self.down = nn.Linear(inner, shape.width, bias=shape.bias)
        self.activation = shape.activation

    def forward(self, value: Tensor) -> Tensor:
        inner = self.up(value)
        if self.activation == "swiglu":  # one kernel that keeps its input alone: torch's of that kind is GLU
            inner = F.glu(inner)
        else:
            inner = F.gelu(inner, approximate="tanh") if self.activation == "gelu" else F.relu(inner).square()
        result: Tensor = self.down(inner)
        return result


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kind = nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm
        self.before, self.behind = kind(shape.width), kind(shape.width)
        self.attention, self.mlp = Attention(shape), MLP(shape)
        self.dropout = shape.dropout

    def forward(self, value: Tensor) -> Tensor:
        value = value + self._dropped(self.attention(self.before(value)))
        return value + self._dropped(self.mlp(self.behind(value)))

    def _dropped(self, value: Tensor) -> Tensor:
        return F.dropout(value, self.dropout, self.training) if self.dropout else value


class Decoder(nn.Module):
    """Words in, logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width) if shape.norm == "rms" else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for layer in self.layers:
            value = layer(value)
        result: Tensor = self.head(self.norm(value))
        return result


def build(shape: Shape) -> Decoder:
    """Return a decoder on meta."""
    with torch.device("meta"):
        return Decoder(shape)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of the next words, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
