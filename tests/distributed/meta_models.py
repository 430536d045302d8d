"""Models that are built on the meta device, with initialisers of many kinds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**values))


class Timm(nn.Module):
    """In timm's manner: a table of a block's own, a buffer on the device of a neighbour, one method for all."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(48, 4))
            self.norm, self.proj = nn.LayerNorm(16), nn.Linear(16, 16)
            self.register_buffer("index", torch.empty(6, 6, dtype=torch.long), persistent=False)
            self.register_buffer("mask", None, persistent=False)
            self.register_buffer("bands", torch.empty(16), persistent=False)
            self.reset_parameters()
            self.init_non_persistent_buffers()

        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.table, std=0.02)
            self.index.copy_(torch.arange(36, device=self.index.device).view(6, 6))
            mask = torch.zeros(4, 4, device=self.norm.weight.device, dtype=self.norm.weight.dtype)
            mask[:2, 2:] = 1
            self.register_buffer("mask", mask.masked_fill(mask != 0, -100.0), persistent=False)

        def init_non_persistent_buffers(self) -> None:
            self.bands.copy_(torch.linspace(0, 1, 16))

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.empty(1, 40, 16))
        self.blocks = nn.Sequential(self.Block(), self.Block())
        self.head = nn.Linear(16, 64)
        self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        nn.init.trunc_normal_(self.pos, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif needs_reset and module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.no_grad():
            for depth, block in enumerate(self.blocks):
                block.proj.weight.div_(math.sqrt(2.0 * (depth + 1)))
        nn.init.normal_(self.head.weight[:32], std=1.0)


class Tied(nn.Module):
    """The tensor is the embedding's, and so are its values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 16, padding_idx=0), nn.Linear(16, 60)
        self.head.weight = self.embed.weight


class TiedByApply(nn.Module):
    """In nanoGPT's manner: tied, then initialised by ``apply``, so that the last module's values stay."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(60, 16), nn.Linear(16, 16), nn.Linear(16, 60, bias=False)
        self.embed.weight = self.head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=5.0)


class Drawing(nn.Module):
    """Draws in ways that could depend on what is real: out of place, into neighbours, from other generators, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 40), nn.Linear(8, 40)
        self.squares = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
        self.tables = nn.ParameterList([nn.Parameter(torch.empty(64)) for _ in range(5)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.a.weight.copy_(torch.randn(40, 8, device=self.b.weight.device))
            self.a.bias.copy_(torch.tensor(list(range(40)), device=self.b.weight.device))
            self.b.weight.add_(torch.rand_like(self.b.weight))
            self.b.bias.mul_(torch.rand(40)).copy_(self.b.bias + torch.arange(40) / 40)
            for square in self.squares:
                nn.init.orthogonal_(square.weight)
            for table in self.tables[3:]:
                nn.init.trunc_normal_(table, std=1.0, a=-1.0, b=1.0)
            self.tables[0].uniform_(generator=torch.Generator().manual_seed(1) if self.a.weight.is_cpu else None)
            self.tables[1].copy_(torch.from_numpy(numpy.random.randn(64)))
            self.tables[2].fill_(0.0).add_(random.gauss(0, 1) + torch.randperm(64))


class NamedApply(nn.Sequential):
    """In the manner of timm's ``named_apply``; one layer lies in two places."""

    def __init__(self) -> None:
        shared = nn.Linear(16, 16)
        super().__init__(shared, nn.Linear(16, 16), shared)
        for name, module in self.named_modules():
            self._init_weights(module, name)

    def _init_weights(self, module: nn.Module, name: str, std: float = 0.5) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std if name == "1" else 2 * std)


class InTransformersManner(nn.Module):
    """A model's ``_init_weights`` is for what is in no inner model, and calls inner methods itself or leaves them.

    The outer model calls them all, once per module.
    """

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.start = nn.Parameter(torch.empty(64)), nn.Parameter(torch.empty(4))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.start)

        def init_weights(self) -> None:
            nn.init.constant_(self.start, 9.0)

    def __init__(self, std: float = 1.0, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.std, self.fc, self.tables, self.inner = std, nn.Linear(16, 16), self.Table(), inner
        self.initialize_weights()

    def initialize_weights(self) -> None:
        self._initialize_weights(self)

    def _initialize_weights(self, module: nn.Module) -> None:
        for child in module.children():
            (child if isinstance(child, InTransformersManner) else self)._initialize_weights(child)
        if not getattr(module, "_is_hf_initialized", False):
            self._init_weights(module)
        module._is_hf_initialized = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.std)
            nn.init.zeros_(module.bias)
        elif isinstance(module, self.Table):
            nn.init.normal_(module.table, std=self.std)


def frozen_and_bfloat16() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.PReLU(8)).to(torch.bfloat16)
    return model.requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": hf("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=32),
    "llama": hf("LlamaForCausalLM", "LlamaConfig", **TINY),
    "bert": hf("BertForMaskedLM", "BertConfig", **TINY),
    "t5": hf("T5ForConditionalGeneration", "T5Config", d_model=32, d_ff=64, d_kv=8, num_layers=2, vocab_size=96),
    "vit": hf("ViTForImageClassification", "ViTConfig", **TINY, image_size=16, patch_size=8),
    "mixtral": hf("MixtralForCausalLM", "MixtralConfig", **TINY, num_key_value_heads=2, num_local_experts=4),
    "clip text": hf("CLIPTextModel", "CLIPTextConfig", **TINY),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
    "transformer": lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=8, add_bias_kv=True),
    "lstm": lambda: nn.LSTM(8, 16, 2, bidirectional=True),
    "norms": frozen_and_bfloat16,
    "embeddings": lambda: nn.ModuleList([nn.Embedding(50, 16, padding_idx=3), nn.EmbeddingBag(50, 8, padding_idx=2)]),
    "softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 60, [10, 30]),
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(16, 16)), weight_norm(nn.Conv1d(8, 8, 3), dim=2)),
    "timm": Timm,
    "tied": Tied,
    "tied by apply": TiedByApply,
    "drawing": Drawing,
    "named apply": NamedApply,
    "in transformers' manner": lambda: InTransformersManner(1.0, InTransformersManner(5.0)),
}
every_model = pytest.mark.parametrize("model", list(MODELS))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a state dict of other values, as a checkpoint of a trained model."""
    values = {
        value.data_ptr(): torch.rand_like(value) if value.is_floating_point() else value + 1
        for value in model.state_dict().values()
    }
    return {name: values[value.data_ptr()] for name, value in model.state_dict().items()}
