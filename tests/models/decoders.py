"""Small decoders that compute their own loss inside, as Hugging Face's do: shifted labels, expert routers' losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 64
WIDTH = 16


class Attention(nn.Module):
    """Causal attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(value).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Sparse mixture: a router picks two of four experts per token; returns the router's logits too."""

    def __init__(self, *, softmax_first: bool) -> None:
        super().__init__()
        self.softmax_first = softmax_first
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in "1234"
        )

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        flat = value.reshape(-1, WIDTH)
        logits = self.gate(flat)
        weights, chosen = torch.topk(F.softmax(logits, dim=-1) if self.softmax_first else logits, 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) if self.softmax_first else F.softmax(weights, dim=-1)
        picked = F.one_hot(chosen, 4).permute(2, 1, 0)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            share = (picked[number].T * weights).sum(-1, keepdim=True)
            output = output + expert(flat) * share
        return output.reshape(value.shape), logits


class Block(nn.Module):
    """Attention and a mixture or a plain layer, each behind a norm."""

    def __init__(self, experts: str | None) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp: nn.Module = nn.Linear(WIDTH, WIDTH)
        if experts is not None:
            self.mlp = Experts(softmax_first=experts == "qwen3_moe")

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        value = value + self.attention(self.first(value))
        found = self.mlp(self.second(value))
        found, logits = found if isinstance(found, tuple) else (found, None)
        return value + found, logits


class Decoder(nn.Module):
    """A language model that returns its loss and its logits."""

    def __init__(self, *, experts: str | None = None, layers: int = 3, items: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = items
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        value, routed = self.embedding(tokens), []
        for layer in self.layers:
            value, logits = layer(value)
            if logits is not None:
                routed.append(logits)
        logits = self.head(self.norm(value))
        loss = causal_loss(logits, labels, self.items)
        if not routed:
            return {"loss": loss, "logits": logits}
        balance = balance_loss(routed, mask)
        return {"loss": loss + 0.02 * balance.to(loss.device), "aux_loss": balance, "logits": logits}


def causal_loss(logits: Tensor, labels: Tensor, items: int | None) -> Tensor:
    """Return the loss of the next tokens, over their number or ``items``."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    flat = logits.view(-1, VOCABULARY)
    loss = F.cross_entropy(
        flat, shifted.to(flat.device), ignore_index=-100, reduction="mean" if items is None else "sum"
    )
    return loss if items is None else loss / items


def balance_loss(routed: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the load balancing loss of the Switch Transformer over all layers, padding left out."""
    logits = torch.cat([layer.to(routed[0].device) for layer in routed], dim=0)
    chances = F.softmax(logits, dim=-1)
    picked = F.one_hot(torch.topk(chances, 2, dim=-1)[1], 4)
    if mask is None:
        tokens, router = picked.to(chances.dtype).mean(0), chances.mean(0)
    else:
        rows, length = mask.shape
        count = logits.shape[0] // (rows * length)
        kept = mask[None, :, :, None, None].expand(count, rows, length, 2, 4).reshape(-1, 2, 4).to(chances)
        tokens = (picked * kept).sum(0) / kept.sum(0)
        kept = mask[None, :, :, None].expand(count, rows, length, 4).reshape(-1, 4).to(chances)
        router = (chances * kept).sum(0) / kept.sum(0)
    return (tokens * router.unsqueeze(0)).sum() * 4
