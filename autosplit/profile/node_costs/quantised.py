"""The work of a linear layer whose frozen weight is packed: whole only while a product runs, forward and backward.

    codes, maxima ──► dequantise [out, in] ──► product ──► result          the weight is freed again
    gradient ───────► dequantise [out, in] ──► product ──► gradient of the input

Numbers mean nothing here: a dequantisation is one product of codes that reads and writes what the kernel does.
Sources: bitsandbytes/autograd/_functions.py and functional.py (0.50); Dettmers et al. 2023, "QLoRA", arXiv 2305.14314,
section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autosplit.trace.scope import codes_of, features_of


class Product(torch.autograd.Function):
    """A product with a quantised weight; ``keeps``: the input is kept for the backward, which does not use it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, bias: torch.Tensor | None, keeps: bool, *packed: Any) -> torch.Tensor:
        """Return the linear layer's result; ``packed`` is what `_dequantised` takes after the dtype."""
        ctx.packed = packed
        if keeps:
            ctx.save_for_backward(value)
        return F.linear(value, _dequantised(value.dtype, *packed), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of the input and the bias."""
        cotangent = gradients[0]
        bias = cotangent.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        value = cotangent @ _dequantised(cotangent.dtype, *ctx.packed) if ctx.needs_input_grad[0] else None
        return value, bias, None, *[None] * len(ctx.packed)


def _dequantised(
    dtype: torch.dtype, shape: tuple[int, int], codes: torch.Tensor, maxima: torch.Tensor | None
) -> torch.Tensor:
    """Return a weight without its numbers, by one operation; maxima that are codes too are there in fp32 beside it."""
    scales = None if maxima is None or maxima.is_floating_point() else maxima * maxima.new_empty(1, dtype=torch.float32)
    count = shape[0] * shape[1]
    weight = codes.reshape(-1, 1) * codes.new_empty(1, -(-count // codes.numel()), dtype=dtype)
    del scales
    return weight.view(-1)[:count].view(shape)


def quantised_linear(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """Return what a layer gives that `autosplit.trace.scope.is_quantised`: input [..., in], result [..., out].

    It computes in the layer's ``compute_dtype`` where it says one, and returns the input's dtype.
    """
    compute = getattr(module, "compute_dtype", None)
    maxima = getattr(getattr(module._parameters.get("weight"), "quant_state", None), "absmax", None)
    operand = value.to(compute) if isinstance(compute, torch.dtype) else value
    codes = max(codes_of(module), key=torch.Tensor.numel)
    keeps = codes.dtype == torch.int8  # MatMul8bitLt does
    bias = getattr(module, "bias", None)
    result: torch.Tensor = Product.apply(operand, bias, keeps, features_of(module), codes, maxima)
    return result.to(value.dtype)
