"""What a cost model is told of an aten call: its class, its arithmetic, its FLOPs and bytes."""

from __future__ import annotations

import torch

from autosplit.profile.ledger import Operation
from cost_models.work import DType, OpWork


def work_of(operation: Operation) -> OpWork:
    """Return what a cost model wants to know of an operation."""
    return OpWork(
        kind=_kind(operation), flops=operation.flops, bytes=operation.bytes, dtype=_arithmetic(operation.dtype)
    )


def _kind(operation: Operation) -> str:
    if "attention" in operation.name:
        return "attention_backward" if operation.name.endswith("backward") else "attention"
    if "conv" in operation.name:
        return "conv"
    return "matmul" if operation.flops else "elementwise"


def _arithmetic(dtype: torch.dtype) -> DType:
    if not dtype.is_floating_point and not dtype.is_complex:
        return "int"
    if dtype.itemsize == 1:
        return "fp8"
    known: dict[torch.dtype, DType] = {
        torch.float64: "fp64",
        torch.complex128: "fp64",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
    }
    return known.get(dtype, "fp32")
