"""Small models in double precision, with names that say nothing of what their layers are for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, ROWS, LENGTH, WORDS = 16, 4, 4, 6, 24


class Pair(nn.Module):
    """A projection, an activation and a projection back, both with a bias."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.b, self.a = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(F.gelu(self.b(x)))


class Gated(nn.Module):
    """A gate and a projection in one weight, its halves one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.y = nn.Linear(WIDTH, 64, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.z(x).chunk(2, dim=-1)
        return x + self.y(F.silu(gate) * up)


class Heads(nn.Module):
    """Attention with fewer heads of keys; queries, keys and values in one weight of unequal parts."""

    def __init__(self, key_heads: int = 2) -> None:
        super().__init__()
        self.key_heads, self.size = key_heads, WIDTH // HEADS
        self.one = nn.Linear(WIDTH, WIDTH + 2 * key_heads * self.size)
        self.norm, self.two = nn.LayerNorm(self.size), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.one(x).split([WIDTH, self.key_heads * self.size, self.key_heads * self.size], dim=-1)
        q = self.norm(q.view(rows, length, HEADS, self.size)).transpose(1, 2)
        k, v = (t.view(rows, length, self.key_heads, self.size).transpose(1, 2) for t in (k, v))
        k, v = (t.repeat_interleave(HEADS // self.key_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.two(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Separate(nn.Module):
    """Attention with a weight for each of queries, keys and values, and scores of its own."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads, self.size = key_heads, WIDTH // HEADS
        self.r = nn.Linear(WIDTH, WIDTH, bias=False)
        self.s, self.t = (nn.Linear(WIDTH, key_heads * self.size, bias=False) for _ in range(2))
        self.u = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.r(x).view(rows, length, HEADS, self.size).transpose(1, 2)
        k, v = (f(x).view(rows, length, self.key_heads, self.size).transpose(1, 2) for f in (self.s, self.t))
        k, v = (
            t[:, :, None]
            .expand(rows, self.key_heads, HEADS // self.key_heads, length, self.size)
            .reshape(rows, HEADS, length, self.size)
            for t in (k, v)
        )
        scores = (q @ k.transpose(-2, -1) * self.size**-0.5).softmax(-1)
        return x + self.u((scores @ v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Experts in one weight of three dimensions each, weighted by a router; all compute all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.e = nn.Parameter(torch.randn(3, WIDTH, 32) / 4)
        self.f = nn.Parameter(torch.randn(3, 32, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        inner = F.silu(torch.einsum("rlw,ewi->erli", x, self.e))
        return x + torch.einsum("erli,eiw,rle->rlw", inner, self.f, shares)


class ListOfExperts(nn.Module):
    """Experts that are modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.others = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.others):
            total = total + expert(x) * shares[..., number, None]
        return total


class Language(nn.Module):
    """An embedding, parts, a norm, and the embedding's own weight as head."""

    def __init__(self, *parts: nn.Module, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        return self.head(self.norm(x))


NETS: dict[str, Callable[[], nn.Module]] = {
    "pairs": lambda: nn.Sequential(Pair(), Pair()),
    "gated": lambda: nn.Sequential(Gated(), nn.LayerNorm(WIDTH), Gated()),
    "fused attention, fewer key heads": lambda: nn.Sequential(nn.LayerNorm(WIDTH), Heads()),
    "attention": lambda: nn.Sequential(nn.LayerNorm(WIDTH), Separate(2), nn.LayerNorm(WIDTH), Separate(HEADS)),
    "one key head": lambda: nn.Sequential(nn.LayerNorm(WIDTH), Separate(1)),
    "experts": lambda: nn.Sequential(nn.LayerNorm(WIDTH), Experts()),
    "list of experts": lambda: nn.Sequential(nn.LayerNorm(WIDTH), ListOfExperts()),
    "tied language model": lambda: Language(Heads(), Pair()),
    "language model": lambda: Language(*(Pair() for _ in range(6)), tied=False),
}


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]().double()


def batch(name: str) -> Tensor:
    torch.manual_seed(1)
    if "language" in name:
        return torch.randint(0, WORDS, (ROWS, LENGTH))
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
