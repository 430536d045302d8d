"""Ordinary models with a place for one unusual module: blocks in lists, skips, heads, tied weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.compare import Batch, Subject

WIDTH = 8
TOKENS = 5
VOCABULARY = 11
Odd = Callable[[], nn.Module]


def linear() -> nn.Linear:
    """Return a layer that keeps the width."""
    return nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    """What many odd modules are beside the odd thing."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()


def inner(model: nn.Module, kind: type) -> nn.Module:
    """Return the module of a class inside a model."""
    return next(module for module in model.modules() if isinstance(module, kind))


class Residual(nn.Module):
    """A pre-norm MLP block."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.inner = inner

    def forward(self, x):
        x = x + self.body(self.norm(x))
        return x if self.inner is None else x + self.inner(x)


class Mlp(nn.Module):
    """Residual blocks over one vector per row; the odd module is inside the second."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([Residual(), Residual(odd()), Residual(), Residual()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Causal self-attention over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, tokens, _ = x.shape
        q, k, v = (part.view(rows, tokens, 2, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Gpt(nn.Module):
    """A language model with tied embeddings; the odd module stands behind the second block."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(), "mlp": Residual(odd() if index == 1 else None)})
            for index in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for layer in self.layers:
            x = layer["mlp"](layer["attention"](x))
        return self.head(self.norm(x))


class Unet(nn.Module):
    """A one-dimensional U-Net; the odd module is its bottleneck, on (rows, length, channels)."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(2, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)])
        self.bottom = odd()
        self.up = nn.ModuleList([nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1), nn.Conv1d(2 * WIDTH, 2, 3, padding=1)])

    def forward(self, x):
        skips = []
        for conv in self.down:
            x = F.gelu(conv(x))
            skips.append(x)
            x = F.avg_pool1d(x, 2)
        x = x + self.bottom(x.transpose(1, 2)).transpose(1, 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = conv(torch.cat([x, skips.pop()], 1))
        return x


class Towers(nn.Module):
    """Two inputs, two towers with a shared trunk, a gate between them; the odd module is in the left tower."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.trunk = Residual()
        self.left = nn.Sequential(nn.Linear(6, WIDTH), Residual(odd()), Residual())
        self.right = nn.Sequential(nn.Linear(4, WIDTH), Residual(), Residual())
        self.gate = nn.Linear(2 * WIDTH, WIDTH)
        self.heads = nn.ModuleDict({"score": nn.Linear(WIDTH, 2), "rating": nn.Linear(WIDTH, 1)})

    def forward(self, left, right):
        a, b = self.trunk(self.left(left)), self.trunk(self.right(right))
        gate = torch.sigmoid(self.gate(torch.cat([a, b], -1)))
        mixed = gate * a + (1 - gate) * b
        return {"score": self.heads["score"](mixed), "rating": self.heads["rating"](mixed)}


class Tagger(nn.Module):
    """A GRU between an embedding and a classifier; the odd module refines the tags' features."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.refine = nn.Sequential(Residual(), odd(), Residual())
        self.classify = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(self, ids):
        states, _ = self.encoder(self.embed(ids))
        return self.classify(self.refine(states))


def vectors(rows: int) -> Batch:
    """Return one vector per row."""
    return (torch.randn(rows, 6, dtype=torch.float64),), {}


def tokens(rows: int) -> Batch:
    """Return token ids."""
    return (torch.randint(1, VOCABULARY, (rows, TOKENS)),), {}


def signals(rows: int) -> Batch:
    """Return two channels of eight values."""
    return (torch.randn(rows, 2, 8, dtype=torch.float64),), {}


def pairs(rows: int) -> Batch:
    """Return a pair of vectors per row."""
    return (torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64)), {}


def padded(rows: int) -> Batch:
    """Return token ids padded with zeros, and the lengths."""
    lengths = torch.randint(1, TOKENS + 1, (rows,))
    ids = torch.randint(1, VOCABULARY, (rows, TOKENS))
    return (ids * (torch.arange(TOKENS) < lengths[:, None]), lengths), {}


HOSTS = {
    "mlp": (Mlp, vectors),
    "gpt": (Gpt, tokens),
    "unet": (Unet, signals),
    "towers": (Towers, pairs),
    "tagger": (Tagger, tokens),
}


class Table:
    """The subjects that were declared, in order."""

    def __init__(self) -> None:
        self.subjects: list[Subject] = []

    def odd(self, kind: str, host: str | None = None, **more):
        """Declare a module class, or a function that makes the module, as the odd module of a host."""
        chosen = host or list(HOSTS)[len(self.subjects) % len(HOSTS)]
        model, batch = HOSTS[chosen]

        def declare(factory):
            return self._add(factory, kind, lambda: model(factory), batch, f"{factory.__name__} in {chosen}", more)

        return declare

    def root(self, kind: str, batch: Callable[[int], Batch] = vectors, **more):
        """Declare a whole model."""

        def declare(factory):
            return self._add(factory, kind, factory, batch, factory.__name__, more)

        return declare

    def _add(self, factory, kind, build, batch, name, more):
        reset = more.pop("reset", None)

        def fresh() -> nn.Module:
            if reset is not None:
                reset()
            return build()

        self.subjects.append(Subject(name=name, kind=kind, build=fresh, batch=batch, **more))
        return factory
