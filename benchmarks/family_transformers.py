"""Five transformers in plain torch: GPT-2, Llama, BERT, ViT and a mixture of experts, each a chain of parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Chain(nn.Module):
    """Parts in a row: the first takes the inputs, each other one what the part before it returned.

    A part that returns a tuple hands its entries over as arguments.
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Tensor:
        state: tuple[Tensor, ...] = inputs
        for part in self.parts:
            result = part(*state)
            state = result if isinstance(result, tuple) else (result,)
        return state[0]


class Attention(nn.Module):
    """Multi-head attention; fewer key and value heads than query heads make it grouped."""

    def __init__(
        self, width: int, heads: int, *, key_heads: int | None = None, causal: bool, bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.causal = heads, key_heads or heads, causal
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key_value = nn.Linear(width, 2 * self.key_heads * self.head_width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        rows, length, width = x.shape
        query = self.query(x).view(rows, length, self.heads, self.head_width).transpose(1, 2)
        both = self.key_value(x).view(rows, length, 2, self.key_heads, self.head_width)
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        if turns is not None:
            query, key = turned(query, *turns), turned(key, *turns)
        if self.key_heads < self.heads:
            copies = self.heads // self.key_heads
            key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Embedding(nn.Module):
    """Tokens, positions and, where there are any, segments; then a norm and dropout where BERT has them."""

    def __init__(self, words: int, width: int, length: int, *, segments: int = 0, norm: bool, dropout: float) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.segment = nn.Embedding(segments, width) if segments else None
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        for table in (self.word, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        if self.segment is not None and segments is not None:
            x = x + self.segment(segments)
        return self.dropout(self.norm(x))


class PreNormBlock(nn.Module):
    """GPT-2's and ViT's block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class PostNormBlock(nn.Module):
    """BERT's block: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, width: int, heads: int, *, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class TiedHead(nn.Module):
    """A norm, and logits by the word embedding's own weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embedding.embedding_dim)
        self.logits = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        self.logits.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def gpt2() -> Chain:
    """Return a small GPT-2: pre-norm, GELU, dropout, tied embedding."""
    embedding = Embedding(16384, 512, 256, norm=False, dropout=0.1)
    blocks = [PreNormBlock(512, 8, causal=True, dropout=0.1) for _ in range(6)]
    return Chain(embedding, *blocks, TiedHead(embedding.word))


class MaskedHead(nn.Module):
    """BERT's prediction of masked words."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.dense, self.norm, self.logits = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(F.gelu(self.dense(x))))


def bert() -> Chain:
    """Return a small BERT: post-norm, GELU, dropout, segments, a head for masked words."""
    embedding = Embedding(8192, 384, 128, segments=2, norm=True, dropout=0.1)
    return Chain(embedding, *[PostNormBlock(384, 6, dropout=0.1) for _ in range(6)], MaskedHead(384, 8192))


class RMSNorm(nn.Module):
    """Root-mean-square norm as Llama's code writes it: in fp32 whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys turned by their positions (rotary embedding, Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Llama's block: RMSNorm, rotary positions, grouped keys, SwiGLU; no bias."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, key_heads: int, inner: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, key_heads=key_heads, causal=True, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        half = width // heads // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = x + self.attention(self.norm1(x), (self.cos[:length], self.sin[:length]))
        hidden = self.norm2(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class LlamaHead(nn.Module):
    """The last norm, and logits by a weight of its own."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm, self.logits = RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def llama() -> Chain:
    """Return a small Llama: 8 query heads, 4 key heads."""
    blocks = [LlamaBlock(512, 8, 4, 1408, 256) for _ in range(6)]
    return Chain(nn.Embedding(8192, 512), *blocks, LlamaHead(512, 8192))


class Patches(nn.Module):
    """An image cut into patches, a class token in front, positions added."""

    def __init__(self, width: int, patch: int, image: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.cut(images).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(images.shape[0], -1, -1), patches), dim=1) + self.position


class ClassHead(nn.Module):
    """Logits of the class token."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x)[:, 0])


def vit() -> Chain:
    """Return a small vision transformer: 128 px in patches of 8, so 257 tokens."""
    blocks = [PreNormBlock(384, 6, causal=False, dropout=0.0) for _ in range(6)]
    return Chain(Patches(384, 8, 128), *blocks, ClassHead(384, 100))


class Experts(nn.Module):
    """Each token goes to its two best experts, which hold a fixed number of places (GShard, Lepikhin et al. 2020).

    What comes after the last place of an expert is dropped. All shapes are fixed, so no routing depends on data: every
    expert computes all its places, full or not.
    """

    def __init__(self, width: int, inner: int, *, experts: int, spare: float = 1.25) -> None:
        super().__init__()
        self.experts, self.spare = experts, spare
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        count, width = tokens.shape
        places = int(2 * count * self.spare / self.experts)
        share, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        is_chosen = F.one_hot(chosen.flatten(), self.experts)
        place = ((is_chosen.cumsum(0) - 1) * is_chosen).sum(-1)
        fits = place < places
        slot = torch.where(fits, chosen.flatten() * places + place, self.experts * places)
        queue = tokens.new_zeros(self.experts * places + 1, width)
        queue = queue.index_copy(0, slot, tokens.repeat_interleave(2, dim=0))
        hidden = F.silu(torch.bmm(queue[:-1].view(self.experts, places, width), self.up))
        done = torch.bmm(hidden, self.down).flatten(0, 1)
        done = torch.cat((done, done.new_zeros(1, width)))
        weighted = done[slot] * share.to(done.dtype).flatten().unsqueeze(-1)
        return weighted.view(count, 2, width).sum(1).view_as(x)


class ExpertBlock(nn.Module):
    """A pre-norm block whose dense layers are experts."""

    def __init__(self, width: int, heads: int, inner: int, *, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.mixture = Experts(width, inner, experts=experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


def mixture() -> Chain:
    """Return a small mixture of experts: eight experts in each block, two for a token."""
    blocks = [ExpertBlock(384, 6, 768, experts=8) for _ in range(4)]
    return Chain(Embedding(8192, 384, 256, norm=False, dropout=0.0), *blocks, LlamaHead(384, 8192))
