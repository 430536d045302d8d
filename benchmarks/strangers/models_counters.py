"""Models with Python counters and one-time flags on their modules."""

from __future__ import annotations

import itertools
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.hosts import VOCABULARY, WIDTH, Attention, Layer, Residual, Table, linear, tokens, vectors

TABLE = Table()


# --- counters -------------------------------------------------------------------------------------------------------


@TABLE.odd("counter")
class CallCounter(Layer):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.fc(x))


@TABLE.odd("counter")
class WarmUp(Layer):
    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.fc(x) * min(1.0, self.step / 4)


@TABLE.odd("counter")
class Statistics(Layer):
    def __init__(self):
        super().__init__()
        self.stats = {"calls": 0, "rows": 0}

    def forward(self, x):
        self.stats["calls"] += 1
        self.stats["rows"] += x.shape[0]
        return F.silu(self.fc(x))


@TABLE.odd("counter")
class AnnealedGate(Layer):
    """The temperature falls while training."""

    def __init__(self):
        super().__init__()
        self.iteration = 0

    def forward(self, x):
        if self.training:
            self.iteration += 1
        temperature = max(0.5, 1.0 - 0.1 * self.iteration)
        return x * torch.softmax(self.fc(x) / temperature, -1)


@TABLE.odd("counter")
class RoundRobin(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([linear(), linear()])
        self.turn = 0

    def forward(self, x):
        expert = self.experts[self.turn % 2]
        self.turn += 1
        return expert(x)


@TABLE.odd("counter")
class Reported(Layer):
    """Every second call a mean is read for the progress bar."""

    def __init__(self):
        super().__init__()
        self.n, self.shown = 0, 0.0

    def forward(self, x):
        if self.n % 2 == 0:
            self.shown = x.mean().item()
        self.n += 1
        return self.fc(x)


@TABLE.odd("counter")
class Ticket(Layer):
    def __init__(self):
        super().__init__()
        self.ids = itertools.count()
        self.last = -1

    def forward(self, x):
        self.last = next(self.ids)
        return self.fc(x).relu()


@TABLE.root("counter", tokens)
class CountingGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Residual()) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.forward_calls = 0
        self.tokens_seen = 0

    def forward(self, ids):
        self.forward_calls += 1
        self.tokens_seen += ids.numel()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# --- one-time flags -------------------------------------------------------------------------------------------------


@TABLE.odd("flag")
class ActNorm(nn.Module):
    """Data-dependent initialisation, as in Glow."""

    def __init__(self):
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.initialized = False

    def forward(self, x):
        if not self.initialized:
            with torch.no_grad():
                flat = x.reshape(-1, WIDTH)
                self.loc.copy_(-flat.mean(0))
                self.scale.copy_(1 / (flat.std(0) + 1e-6))
            self.initialized = True
        return (x + self.loc) * self.scale


@TABLE.odd("flag")
class WarnsOnce(Layer):
    warned = False

    def forward(self, x):
        if not self.warned:
            warnings.warn("this layer is deprecated", stacklevel=2)
            self.warned = True
        return self.fc(x)


@TABLE.odd("flag")
class RemembersWidth(Layer):
    def __init__(self):
        super().__init__()
        self.width = None

    def forward(self, x):
        if self.width is None:
            self.width = x.shape[-1]
        return self.fc(x) / self.width**0.5


@TABLE.odd("flag")
class CachedPositions(Layer):
    def __init__(self):
        super().__init__()
        self.positions = None

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        return self.fc(x + self.positions)


@TABLE.odd("flag")
class BufferFlag(Layer):
    """The flag is a buffer, so that it is saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x):
        if not self.ready:
            self.offset.fill_(0.25)
            self.ready.fill_(True)
        return self.fc(x + self.offset)


@TABLE.odd("flag")
class InitOnFirstUse(Layer):
    def __init__(self):
        super().__init__()
        self.first = True

    def forward(self, x):
        if self.first:
            nn.init.eye_(self.fc.weight)
            self.first = False
        return self.fc(x)


@TABLE.odd("flag", "gpt")
class CausalMask(Layer):
    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        if self.mask is None or self.mask.size(0) != x.size(1):
            self.mask = torch.tril(torch.ones(x.size(1), x.size(1), dtype=x.dtype)) / x.size(1)
        return self.fc(self.mask @ x)


@TABLE.root("flag", vectors)
class PreparedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), Residual(), nn.Linear(WIDTH, 2))
        self.prepared = False
        self.names = None

    def forward(self, x):
        if not self.prepared:
            self.names = [name for name, _ in self.blocks.named_children()]
            self.prepared = True
        return self.blocks(x)
