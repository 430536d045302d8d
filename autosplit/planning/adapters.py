"""A model on paper with a frozen, perhaps quantised base and LoRA adapters: the operations of PEFT and bitsandbytes.

    x ──► base: W frozen, or packed and dequantised for each product ──► (+) ──►
      └─► cast ─► dropout ─► A [r, in] ─► B [out, r] ─► · alpha / r ────┘          A and B are trained

Numbers mean nothing here. Sources: peft/tuners/lora/layer.py and bnb.py (0.21); of the base see
`autosplit.profile.node_costs.quantised`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import cast

import torch
from torch import nn

from autosplit.adapters import Adapters, Lora
from autosplit.errors import InputError
from autosplit.profile.node_costs.quantised import Product

_BLOCK, _NESTED = 64, 256
"""Weights that share a maximum in nf4, and maxima that share one of their own."""
_TABLES = 16 + 256 + 1
"""Numbers in fp32 that bitsandbytes keeps beside a weight in nf4: two code books and an offset."""


class Params4bit(nn.Parameter):
    """A frozen weight of two elements in a byte; the name is bitsandbytes', which PEFT and profiles count by."""


class Quantised(nn.Module):
    """A linear layer with a frozen weight in nf4 or int8 that computes in ``compute``, as bitsandbytes' layers."""

    def __init__(self, linear: nn.Module, base: str, compute: torch.dtype) -> None:
        super().__init__()
        self.shape, self.compute, self.bias = _shape(linear), compute, linear.bias
        count, of = self.shape[0] * self.shape[1], cast(torch.Tensor, linear.weight)

        def buffer(size: int, dtype: torch.dtype) -> torch.Tensor:
            return of.new_empty(size, dtype=dtype)

        if base == "int8":
            self.weight = nn.Parameter(of.new_empty(self.shape, dtype=torch.int8), requires_grad=False)
            self.register_buffer("scales", buffer(self.shape[0], torch.float32))
            self.register_buffer("nested", None)
            return
        blocks = -(-count // _BLOCK)
        self.weight = Params4bit(buffer(-(-count // 2), torch.uint8), requires_grad=False)
        self.register_buffer("scales", buffer(blocks, torch.uint8))
        self.register_buffer("nested", buffer(-(-blocks // _NESTED) + _TABLES, torch.float32))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the layer's result in the dtype of its input."""
        keeps, maxima = self.nested is None, None if self.nested is None else self.scales
        result = Product.apply(value.to(self.compute), self.bias, keeps, self.shape, self.weight, maxima)
        return result.to(value.dtype)


class LoraLinear(nn.Module):
    """A frozen layer with an adapter, in PEFT's names and operations."""

    def __init__(self, base_layer: nn.Module, lora: Lora, shape: tuple[int, int]) -> None:
        super().__init__()
        like = base_layer.weight
        narrow = like.dtype not in (torch.float32, torch.float64)
        dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[lora.dtype]) if narrow else like.dtype
        self.base_layer, self.quantised = base_layer, type(base_layer) is Quantised
        self.copied = type(like) is Params4bit
        self.lora_A = nn.Linear(shape[1], lora.r, bias=False, device=like.device, dtype=dtype)
        self.lora_B = nn.Linear(lora.r, shape[0], bias=False, device=like.device, dtype=dtype)
        self.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.scaling = (lora.alpha or lora.r) / lora.r
        self.train(base_layer.training)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the base's result and the adapter's."""
        result = self.base_layer(value)
        dtype = result.dtype
        if self.copied:
            result = result.clone()
        value = value.to(self.lora_A.weight.dtype)
        added = self.lora_B(self.lora_A(self.lora_dropout(value))) * self.scaling
        return result + added.to(dtype) if self.quantised else (result + added).to(dtype)


def adapt(model: nn.Module, adapters: Adapters, *, compute: torch.dtype | None) -> None:
    """Freeze a model on meta, pack its linear weights and add adapters, in place.

    ``compute``: what quantised layers compute in; None: in the dtype that their weights had. A head that gives a
    model's output, and weights that are tied, stay as they are, as transformers and PEFT leave them. Raises InputError
    where a target names no linear layer.
    """
    model.requires_grad_(False)
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    rest = _others(model, linear)
    targets = set(linear) - rest if adapters.lora is not None else set()
    if adapters.lora is not None and (wanted := adapters.lora.targets):
        for target in wanted:
            if not any(_named(name, target) for name in linear):
                last = dict.fromkeys(name.rpartition(".")[2] for name in linear)
                raise InputError(f"lora: no linear layer is called {target!r}; there are {', '.join(last) or 'none'}")
        targets = {name for name in linear if any(_named(name, target) for target in wanted)}
    elif adapters.lora is not None:
        _warn_of_others(model, linear)
    for name, module in linear.items():
        layer, shape = module, _shape(module)
        if adapters.base is not None and name not in rest:
            layer = Quantised(module, adapters.base, compute or module.weight.dtype).train(module.training)
        if adapters.lora is not None and name in targets:
            layer = LoraLinear(layer, adapters.lora, shape)
        if layer is not module:
            model.set_submodule(name, layer)


def _warn_of_others(model: nn.Module, linear: Collection[str]) -> None:
    """Warn of matrices that no linear layer has, such as stacked experts: PEFT adapts some of these."""
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    known = tables.union(linear)
    others = [name for name, p in model.named_parameters() if p.dim() > 1 and name.rpartition(".")[0] not in known]
    if others:
        warnings.warn(
            f"lora: {len(others)} parameters of no linear layer (first: {others[0]}) get no adapter here, PEFT may "
            "adapt them; for such a model plan what peft.get_peft_model makes",
            stacklevel=2,
        )


def _named(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"  # GPT-2's, with its weight transposed


def _shape(linear: nn.Module) -> tuple[int, int]:
    """Return how many features come out and go in."""
    first, second = cast(torch.Tensor, linear.weight).shape
    return (first, second) if isinstance(linear, nn.Linear) else (second, first)


def _others(model: nn.Module, linear: dict[str, nn.Module]) -> set[str]:
    """Return the linear layers that are neither quantised nor among all linear ones: the head, and those with ties.

    The head is the model's ``get_output_embeddings()``, else the last one, as for transformers' quantisers.
    """
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    head = getattr(model, "get_output_embeddings", lambda: None)() or next(reversed(linear.values()), None)
    return {name for name, module in linear.items() if module is head or uses[id(module.weight)] > 1}
