"""Statements of random programs: each takes ``x`` of shape [rows, 4, 8] and leaves an ``x`` of that shape.

A statement stands alone, so a program stays valid when any of its statements is left out. In the texts N is a number of
the statement's own; lines before the bar belong to ``__init__``, lines behind it to ``forward``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

BAR = "|"


@dataclass(frozen=True)
class Statement:
    """Lines of a module: what it makes, and what it does."""

    kind: str
    made: tuple[str, ...]
    done: tuple[str, ...]

    @classmethod
    def parse(cls, kind: str, text: str, number: int) -> Statement:
        """Read ``made ; made | done ; done``; a line of ``done`` may begin with spaces."""
        made, _, done = re.sub(r"(?<=[a-z])N\b", str(number), text).rpartition(BAR)
        return cls(
            kind, tuple(part.strip() for part in made.split(";") if part.strip()), tuple(done.strip().split("; "))
        )


LAYERS = (
    "self.fcN = nn.Linear(8, 8) | x = torch.tanh(self.fcN(x))",
    "self.fcN = nn.Linear(8, 8) | x = x + F.gelu(self.fcN(x))",
    "self.normN = nn.LayerNorm(8) | x = self.normN(x)",
    "self.upN = nn.Linear(8, 16); self.downN = nn.Linear(16, 8) | x = x + self.downN(F.silu(self.upN(x)))",
    "self.convN = nn.Conv1d(4, 4, 3, padding=1) | x = torch.tanh(self.convN(x))",
    "self.wN = nn.Parameter(torch.randn(8, 8) * 0.3) | x = torch.sin(x @ self.wN)",
    "self.gruN = nn.GRU(8, 8, batch_first=True) | x = self.gruN(x)[0]",
    "self.qkvN = nn.Linear(8, 24) | q, k, v = self.qkvN(x).chunk(3, -1); x = F.scaled_dot_product_attention(q, k, v)",
    "self.embN = nn.Embedding(8, 8) | x = torch.tanh(x + self.embN(x.detach().argmax(-1)))",
    "self.listN = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) |"
    " for layer in self.listN:;     x = layer(x).tanh() + x",
    "self.mapN = nn.ModuleDict({'a': nn.Linear(8, 8), 'b': nn.Linear(8, 8)}) |"
    " x = self.mapN['a'](x) * self.mapN['b'](x).sigmoid()",
    "self.gN = nn.Parameter(torch.ones(8)) | x = F.normalize(x, dim=-1) * self.gN.abs()",
)
VIEWS = (
    "| a, b = x.chunk(2, -1); x = torch.cat([b, a * 0.5], -1)",
    "| x = x.transpose(1, 2).reshape(x.shape)",
    "| x = x.flatten(1).unflatten(1, (4, 8)).cos()",
    "| x = torch.stack(x.unbind(1)[::-1], 1)",
    "| x = torch.cat(x.split([1, 3], 1)[::-1], 1)",
    "| x = x.unsqueeze(1).expand(-1, 3, -1, -1).mean(1)",
    "| x = x.reshape(-1, 8).softmax(-1).view(x.shape) + x",
    "| x = x + x[:, 1:3].mean(1, keepdim=True)",
    "| x = x.roll(1, -1) + x[..., ::2].repeat(1, 1, 2)",
    "| x = x + x.view(x.size(0), 2, 2, 8).mean(2).repeat_interleave(2, 1)",
    "| x = x.gather(-1, x.detach().argsort(-1))",
    "| x = x + x.topk(2, -1).values.sum(-1, keepdim=True) * 0.1",
    "| x = torch.einsum('btd,bsd->bts', x, x).softmax(-1) @ x",
    "| x = x.cumsum(1) * 0.4",
)
INPLACE = (
    "| x = x * 1.0; x[:, 0].mul_(0.5)",
    "| x = x * 1.0; x.transpose(1, 2)[:, 3].add_(0.2)",
    "| x = x.clone(); x[..., 2:5] = x[..., :3].clone()",
    "| x = x + 0; x.view(-1)[::2].add_(0.1)",
    "self.fcN = nn.Linear(8, 8) | x = self.fcN(x); x += 0.1; x.clamp_(-2, 2)",
    "| y = torch.empty_like(x); y.copy_(x); y[:, 1] = x[:, 2] * 2; x = y",
    "| x = x * 1.0; x.masked_fill_(x.detach() > 1, 1.0)",
    "| x = torch.sigmoid(x); x = x.mul(2).sub_(1)",
    "| y = torch.zeros_like(x); y[:, ::2] += x[:, ::2]; x = y + x * 0.5",
    "self.fcN = nn.Linear(8, 8) | x = F.relu(self.fcN(x), inplace=True) + x",
    "| x = x * 1.0; x[x.detach() < -1] = -1.0",
)
MIXING = (
    "| x = x - x.mean(0)",
    "| x = x + 0.1 * x.flip(0)",
    "| x = x + 0.2 * x[x.detach()[:, 0, 0].argsort()]",
    "| x = x * torch.softmax(x.sum((1, 2)), 0)[:, None, None]",
    "| x = x / (1 + 0.1 * x.norm())",
    "| x = x + 0.1 * x.cumsum(0)",
    "| x = 0.5 * (x + x[torch.randperm(len(x))])",
    "| x = x + 0.1 * x.detach().sort(0).values",
    "| x = x + 0.1 * x.roll(1, 0)",
    "| x = x + 0.01 * torch.arange(x.shape[0])[:, None, None]",
    "| x = x - 0.1 * x[:, 0, 0].msort()[:, None, None]",
)
TIES = (
    "self.aN = nn.Linear(8, 8); self.bN = nn.Linear(8, 8); self.bN.weight = self.aN.weight |"
    " x = torch.tanh(self.aN(x)); x = x + self.bN(x)",
    "self.fcN = nn.Linear(8, 8) | x = F.linear(torch.tanh(self.fcN(x)), self.fcN.weight.t())",
    "| x = torch.tanh(F.linear(x, self.shared))",
    "self.againN = nn.Linear(8, 8) | x = self.againN(torch.tanh(self.againN(x)))",
)
BUFFERS = (
    "self.register_buffer('sN', torch.ones(8)) | x = x * self.sN.exp(); self.sN.mul_(0.9) if self.training else None",
    "self.register_buffer('cN', torch.zeros(())) | self.cN += 1; x = x / (1 + self.cN)",
    "self.register_buffer('cN', torch.zeros((), dtype=torch.long)) | x = x * 0.9; self.cN.add_(1)",
    "self.register_buffer('eN', torch.zeros(8)) |"
    " x = torch.tanh(x - self.eN); self.eN.lerp_(x.detach().mean((0, 1)), 0.1)",
    "self.register_buffer('mN', torch.zeros(8)) |"
    " x = x + self.mN; self.mN = 0.9 * self.mN + 0.1 * x.detach().mean((0, 1))",
    "self.register_buffer('hN', torch.ones(())) |"
    " x = x / self.hN.sqrt(); self.hN.copy_(torch.maximum(self.hN, x.detach().abs().max()))",
    "self.register_buffer('rN', torch.ones(8)); self.fcN = nn.Linear(8, 8) |"
    " x = self.fcN(x * self.rN.sqrt()); self.rN[:4] += 0.1",
    "self.register_buffer('qN', torch.randn(6, 8)) |"
    " x = x + (x @ self.qN.clone().T).softmax(-1) @ self.qN.clone(); self.qN[0] = x.detach()[0, 0]",
)
HOOKS = (
    "| x = x * 1.0; x.register_hook(lambda g: g * 0.5) if x.requires_grad else None",
    "self.fcN = nn.Linear(8, 8); self.fcN.register_forward_hook(lambda m, a, o: o * 0.9) | x = self.fcN(x).tanh()",
    "self.fcN = nn.Linear(8, 8); self.fcN.register_forward_pre_hook(lambda m, a: (a[0] + 0.1,)) |"
    " x = self.fcN(x).tanh()",
    "self.fcN = nn.Linear(8, 8); self.fcN.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)) | x = x + self.fcN(x)",
    "self.fcN = nn.Linear(8, 8); self.fcN.register_forward_hook(lambda m, a, o: SEEN.append(tuple(o.shape[1:]))) |"
    " x = self.fcN(x).tanh()",
)
STATE = (
    "self.scaleN = counting() | x = self.scaleN(x)",
    "self.scaleN = averaging() | x = self.scaleN(x)",
    "self.callsN = 0 | self.callsN += 1; x = x * 0.9",
    "self.featN = None | self.featN = x.detach()",
    "self.logN = [] | self.logN.append(tuple(x.shape))",
)
RANDOM = (
    "| x = F.dropout(x, 0.2, self.training)",
    "self.dropN = nn.Dropout(0.1) | x = self.dropN(x)",
    "| x = x + 0.1 * torch.randn_like(x)",
    "| x = x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) + 0.5)",
    "| x = x + 0.1 * torch.randn(8, dtype=x.dtype)",
    "| x = x * torch.bernoulli(torch.sigmoid(x.detach()))",
)
CONTROL = (
    "| if x.shape[0] > 6:;     x = x * 1.1",
    "| if x.dim() == 3 and x.shape[1] % 2 == 0:;     x = x.cos()",
    "| if self.training:;     x = x * 0.8",
    "| if float(x.detach().abs().max()) > 3:;     x = x / 2",
    "| with torch.no_grad():;     w = torch.softmax(x, -1); x = x * w",
    "| x = x + x.detach().tanh() * 0.3",
    "self.fcN = nn.Linear(8, 8) | with torch.no_grad():;     y = self.fcN(x); x = x + y.sin()",
    "self.fcN = nn.Linear(8, 8) | x = checkpoint(self.fcN, x, use_reentrant=False)",
    "| x = Scaled.apply(x, 0.5)",
    "| kept = x",
    "| x = x + 0.5 * kept",
    "| x = x + 0.5 * kept.flatten(1).mean(1)[:, None, None]",
    "| parts = {'left': x[..., :4], 'right': x[..., 4:]}; x = torch.cat([parts['right'], parts['left']], -1)",
)
ROOT = (
    "| x = x + y[:, None]",
    "| x = x * scale",
    "| x = x.tanh() if flag else x",
    "| x = x if mask is None else x.masked_fill(mask[:, None, None], 0.0)",
)
PALETTE: Mapping[str, tuple[tuple[str, ...], int]] = {
    "layer": (LAYERS, 30),
    "view": (VIEWS, 14),
    "in-place": (INPLACE, 12),
    "tie": (TIES, 6),
    "buffer": (BUFFERS, 8),
    "hook": (HOOKS, 4),
    "random": (RANDOM, 6),
    "control": (CONTROL, 12),
    "mixing": (MIXING, 3),
    "state": (STATE, 2),
}


def draw(source: random.Random, number: int) -> Statement:
    """Return a random statement."""
    kinds = list(PALETTE)
    (kind,) = source.choices(kinds, [PALETTE[name][1] for name in kinds])
    return Statement.parse(kind, source.choice(PALETTE[kind][0]), number)


def draw_root(source: random.Random, number: int) -> Statement:
    """Return a random statement that reads the forward's other arguments."""
    return Statement.parse("argument", source.choice(ROOT), number)
