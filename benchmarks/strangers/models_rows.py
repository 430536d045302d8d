"""Models that select rows: token experts and masks as indices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.hosts import VOCABULARY, WIDTH, Attention, Layer, Residual, Table, inner, linear, tokens

TABLE = Table()


class Experts(nn.Module):
    """A router and three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )

    def routed(self, x):
        """Return rows of tokens, each one's gate and expert."""
        flat = x.reshape(-1, WIDTH)
        gates, chosen = torch.softmax(self.router(flat), -1).max(-1)
        return flat, gates, chosen


# --- token experts --------------------------------------------------------------------------------------------------


@TABLE.odd("moe", "gpt")
class SwitchByNonzero(Experts):
    def forward(self, x):
        flat, gates, chosen = self.routed(x)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero(as_tuple=True)[0]
            out[rows] = expert(flat[rows]) * gates[rows, None]
        return out.view_as(x)


@TABLE.odd("moe", "mlp")
class SwitchByWhere(Experts):
    def forward(self, x):
        flat, gates, chosen = self.routed(x)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            out.index_add_(0, rows, expert(flat[rows]) * gates[rows, None])
        return out.view_as(x)


@TABLE.odd("moe", "tagger")
class MixtralTopTwo(Experts):
    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(torch.softmax(self.router(flat), -1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            place, token = torch.where(mask[index])
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.reshape(x.shape)


@TABLE.odd("moe", "unet")
class SkipsIdleExperts(Experts):
    def forward(self, x):
        flat, gates, chosen = self.routed(x)
        out = flat.clone()
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                out[mask] = gates[mask].unsqueeze(-1) * expert(flat[mask])
        return out.view_as(x)


@TABLE.odd("moe", "towers")
class ContinuesOnEmpty(Experts):
    def forward(self, x):
        flat, gates, chosen = self.routed(x)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == index).squeeze(-1)
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, gates[rows, None] * expert(flat[rows]))
        return out.view_as(x)


@TABLE.odd("moe", "gpt")
class SortedDispatch(Experts):
    def forward(self, x):
        flat, gates, chosen = self.routed(x)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=3).tolist()
        parts = [expert(part) for expert, part in zip(self.experts, flat[order].split(counts), strict=True)]
        out = torch.empty_like(flat)
        out[order] = torch.cat(parts)
        return (out * gates[:, None]).view_as(x)


@TABLE.odd("moe", "gpt", extra_loss=lambda model: 0.1 * inner(model, BalancedExperts).balance)
class BalancedExperts(Experts):
    """Keeps the balancing loss, which needs all tokens of the batch."""

    def forward(self, x):
        flat, gates, chosen = self.routed(x)
        load = F.one_hot(chosen, 3).to(x.dtype).mean(0)
        self.balance = (load * torch.softmax(self.router(flat), -1).mean(0)).sum()
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            out[rows] = expert(flat[rows])
        return (gates[:, None] * out).view_as(x)


@TABLE.root("moe", tokens)
class ExpertGpt(nn.Module):
    """Every second block has experts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(4))
        self.mlp = nn.ModuleList(SwitchByNonzero() if index % 2 else Residual() for index in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + mlp(attention(x))
        return self.norm(x) @ self.embed.weight.T


# --- x[mask] --------------------------------------------------------------------------------------------------------


@TABLE.odd("mask")
class ZeroesNegatives(Layer):
    def forward(self, x):
        y = self.fc(x).clone()
        y[y < 0] = 0
        return y


@TABLE.odd("mask")
class RewritesPositives(Layer):
    def forward(self, x):
        y = self.fc(x)
        mask = y > 0
        out = torch.zeros_like(y)
        out[mask] = torch.sqrt(y[mask] + 1e-6)
        return out


@TABLE.odd("mask")
class WorksOnKept(Layer):
    def forward(self, x):
        keep = x.sum(-1) > 0
        y = x.clone()
        y[keep] = self.fc(x[keep])
        return y


@TABLE.odd("mask")
class ReturnsEarly(Layer):
    def forward(self, x):
        keep = x.mean(-1) > 0.1
        if not keep.any():
            return x
        return x.masked_scatter(keep.unsqueeze(-1).expand_as(x), self.fc(x[keep]))


@TABLE.odd("mask")
class CleansNan(Layer):
    def forward(self, x):
        y = torch.log(self.fc(x))
        y[torch.isnan(y)] = 0.0
        return y.clamp(-3, 3)


@TABLE.odd("mask")
class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = linear(), linear()

    def forward(self, x):
        mask = x.norm(dim=-1) > 2
        out = torch.empty_like(x)
        out[mask] = self.high(x[mask])
        out[~mask] = self.low(x[~mask])
        return out


@TABLE.odd("mask", "tagger")
class FirstTokens(Layer):
    def forward(self, x):
        first = x[:, 0]
        mask = first[:, 0] > 0
        out = self.fc(x).clone()
        out[mask, 0] = first[mask] * 2
        return out


def masked_tokens(rows: int):
    """Return ids, some of them masked, and where."""
    (ids,), _ = tokens(rows)
    return (ids, torch.rand(ids.shape) < 0.3), {}


@TABLE.root("mask", masked_tokens)
class MaskedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mask_token = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Residual()) for _ in range(3))

    def forward(self, ids, masked):
        x = self.embed(ids)
        x[masked] = self.mask_token
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)
