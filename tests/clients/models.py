"""Tiny models of transformers with random weights, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autosplit import autosplit

STEPS = 20
TOLERANCE = 1e-6
VOCABULARY = 64
WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS |= {"use_cache": False}


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**(WORDS | sizes | more)))


def gpt2(**more: Any) -> nn.Module:
    """A model with dropout and a tied head."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**(WORDS | sizes | more)))


def split(model: nn.Module, **options: Any) -> Any:
    return autosplit(model, **({"devices": 2, "chunks": 2} | options))


def rows(count: int, *, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Rows of token ids; some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, 8), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def batches(count: int, *, size: int = 4) -> list[dict[str, torch.Tensor]]:
    every = rows(count * size)
    parts = (every[start : start + size] for start in range(0, len(every), size))
    return [{name: torch.stack([row[name] for row in part]) for name in part[0]} for part in parts]


def train(model: nn.Module, *, steps: int = STEPS, parameters: Any = None) -> list[float]:
    """Train with a loop as one writes it; return the losses."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters() if parameters is None else parameters, lr=1e-3)
    losses = []
    for batch in batches(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_close(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) > 0
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=TOLERANCE)
