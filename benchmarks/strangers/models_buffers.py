"""Models that write buffers after reading them, and models that write into their inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.hosts import WIDTH, Layer, Residual, Table, linear, tokens, vectors

TABLE = Table()

# --- buffers that are written after they were read ------------------------------------------------------------------


@TABLE.odd("buffers")
class RunningNorm(nn.Module):
    """Normalises by the running statistics, then moves them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = (x - self.mean) * self.spread.rsqrt() * self.weight
        if self.training:
            flat = x.detach().reshape(-1, WIDTH)
            self.mean.mul_(0.9).add_(0.1 * flat.mean(0))
            self.spread.mul_(0.9).add_(0.1 * flat.std(0))
        return y


@TABLE.odd("buffers")
class Quantizer(nn.Module):
    """Vector quantisation whose codebook follows the codes by a moving average."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        chosen = torch.cdist(flat.detach(), self.codes).argmin(-1)
        quantized = self.codes[chosen]
        out = flat + (quantized - flat).detach() + 0.1 * flat * quantized
        if self.training:
            hot = F.one_hot(chosen, 4).to(x.dtype)
            self.counts.mul_(0.9).add_(0.1 * hot.sum(0))
            self.codes.mul_(0.9).add_(0.1 * (hot.T @ flat.detach()) / self.counts[:, None])
        return out.view_as(x)


@TABLE.odd("buffers")
class StepScale(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        y = self.fc(x) / (1.0 + self.steps)
        self.steps += 1
        return y


@TABLE.odd("buffers")
class MovingOffset(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.fc(x) * (1 + self.ema))
        with torch.no_grad():
            self.ema.lerp_(y.reshape(-1, WIDTH).mean(0), 0.1)
        return y


@TABLE.odd("buffers")
class PowerIteration(Layer):
    """Spectral normalisation by hand: u moves before the weight is used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("u", torch.ones(WIDTH))

    def forward(self, x):
        weight = self.fc.weight
        with torch.no_grad():
            v = F.normalize(weight.T @ self.u, dim=0)
            self.u.copy_(F.normalize(weight @ v, dim=0))
        return F.linear(x, weight / (self.u @ weight @ v), self.fc.bias)


@TABLE.odd("buffers")
class Observer(Layer):
    """Quantisation-aware training: the range that was seen so far sets the scale."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x):
        y = self.fc(x)
        scale = self.largest / 7
        out = y + (torch.round(y / scale) * scale - y).detach() * y
        self.largest.copy_(torch.maximum(self.largest, y.detach().abs().max()))
        return out


@TABLE.odd("buffers")
class RebindsBuffer(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.fc(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().reshape(-1, WIDTH).mean(0)
        return y


@TABLE.root("buffers", vectors)
class Dino(nn.Module):
    """The output is centred by a running centre, which then moves."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), Residual(), nn.Linear(WIDTH, 4))
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, x):
        out = self.body(x)
        centred = torch.softmax((out - self.center) / 0.5, -1)
        self.center.mul_(0.9).add_(out.detach().mean(0, keepdim=True), alpha=0.1)
        return centred


@TABLE.root("buffers", vectors)
class KeyQueue(nn.Module):
    """MoCo's queue of keys: read, then overwritten by this batch's keys."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), Residual())
        self.register_buffer("queue", F.normalize(torch.randn(16, WIDTH), dim=-1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        query = F.normalize(self.body(x), dim=-1)
        logits = query @ self.queue.clone().T
        if self.training:
            places = (self.pointer + torch.arange(len(x))) % len(self.queue)
            self.queue[places] = query.detach()
            self.pointer += len(x)
        return logits


# --- writes into inputs ---------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks and a head behind an input layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), Residual(), nn.Linear(WIDTH, 3))


@TABLE.root("in-place", vectors, leaf_inputs=False)
class HalvesInput(Stack):
    def forward(self, x):
        x.mul_(0.5)
        return self.blocks(x)


@TABLE.root("in-place", vectors, leaf_inputs=False)
class NormalizesInput(Stack):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((6,), 0.1))

    def forward(self, x):
        x -= self.mean
        x /= 2.0
        return self.blocks(x)


@TABLE.root("in-place", vectors, leaf_inputs=False)
class ClearsColumn(Stack):
    def forward(self, x):
        x[:, 0] = 0
        x[:, 1:3].clamp_(-1, 1)
        return self.blocks(x)


@TABLE.root("in-place", tokens)
class ReplacesTokens(nn.Module):
    """Pads become another token in the caller's ids, as data collators forget to."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.Sequential(Residual(), Residual(), Residual(), nn.Linear(WIDTH, 5))

    def forward(self, ids):
        ids[ids == 3] = 0
        return self.blocks(self.embed(ids))


@TABLE.root(
    "in-place", lambda rows: ((), {"batch": {"x": vectors(rows)[0][0], "weight": torch.rand(rows, 1).double()}})
)
class UpdatesDict(Stack):
    def forward(self, batch):
        batch["x"].mul_(batch["weight"])
        return self.blocks(batch["x"])


@TABLE.root("in-place", vectors, leaf_inputs=False)
class WritesData(Stack):
    def forward(self, x):
        x.data.add_(1.0)
        return self.blocks(x)


@TABLE.odd("in-place")
class InplaceChain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = linear(), nn.ReLU(inplace=True), linear()

    def forward(self, x):
        y = self.act(self.first(x))
        y = self.second(y)
        y += x
        return y.mul_(0.5)


@TABLE.odd("in-place")
class WritesThroughView(Layer):
    def forward(self, x):
        y = self.fc(x).clone()
        left, right = y[..., : WIDTH // 2], y[..., WIDTH // 2 :]
        left.add_(right)
        right[..., 0] = 0
        return y
