"""The work of one operation, in numbers that any device can be asked about."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int"]
"""The arithmetic that an operation runs in; ``int`` is every integer and boolean type."""


class OpWork(BaseModel):
    """What one operation does: its floating-point operations, the bytes it reads and writes, and its arithmetic.

    ``kind`` names a class of operations that reach a similar share of a device's peak: matmul, conv, attention,
    attention_backward, elementwise, reduction, normalization, embedding, copy, recurrent, optimizer, sort, other; a
    cost model treats a kind that it does not know as ``other``. ``launches`` counts the kernels: 0 for a view.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    kind: str
    flops: int = Field(ge=0)
    bytes: int = Field(ge=0)
    dtype: DType
    launches: int = Field(default=1, ge=0)
