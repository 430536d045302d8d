"""Llama's shape in plain torch: grouped-query attention with rotary positions, SwiGLU, RMS norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, groups * self.head, bias=False) for _ in range(2))

    def forward(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, own = (self._heads(linear(value)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (_rotated(each, cos, sin) for each in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, own, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, value: Tensor) -> Tensor:
        return value.unflatten(-1, (-1, self.head)).transpose(1, 2)


def _rotated(value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = value.chunk(2, -1)
    return value * cos + torch.cat((-right, left), -1) * sin


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, groups: int) -> None:
        super().__init__()
        self.before, self.behind = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, groups)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        value = value + self.attention(self.before(value), cos, sin)
        start = self.behind(value)
        result: Tensor = value + self.down(F.silu(self.gate(start)) * self.up(start))
        return result


class Llama(nn.Module):
    """Touvron et al. 2023 (arXiv 2307.09288); the defaults are those of 70B."""

    def __init__(
        self, *, width: int = 8192, inner: int = 28672, layers: int = 80, heads: int = 64, groups: int = 8
    ) -> None:
        super().__init__()
        words, length = 32000, 4096
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width, inner, heads, groups) for _ in range(layers)])
        self.norm, self.lm_head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, words, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, width // heads))

    def forward(self, ids: Tensor) -> Tensor:
        value, length = self.embed(ids), ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            value = layer(value, cos, sin)
        result: Tensor = self.lm_head(self.norm(value))
        return result
