"""The work of one operation, in numbers that any device can be asked about."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int"]
"""The arithmetic that an operation runs in; ``int`` is every integer and boolean type."""

KINDS = (
    "matmul",
    "conv",
    "attention",
    "attention_backward",
    "elementwise",
    "reduction",
    "normalization",
    "embedding",
    "copy",
    "recurrent",
    "optimizer",
    "sort",
    "other",
)
"""The classes of operations; a kind may be refined after a dot: ``conv.backward``, ``elementwise.special``."""

MATRIX_KINDS = frozenset(("matmul", "conv", "attention", "attention_backward", "recurrent"))
"""The classes that run on matrix units where the device has them, so that their dtype decides the peak."""


class OpWork(BaseModel):
    """What one operation does: its floating-point operations, the bytes it reads and writes, and its arithmetic.

    ``kind`` names a class of operations that reach a similar share of a device's peak, one of ``KINDS``, and after a
    dot what a finer model may tell apart; a cost model that does not know the refinement takes the class, and one that
    does not know the class takes ``other``. ``launches`` counts the kernels: 0 for a view. ``sides``: batch, rows,
    columns and inner length of a product; heads of all rows, queries, keys and width of attention; none: not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    kind: str
    flops: int = Field(ge=0)
    bytes: int = Field(ge=0)
    dtype: DType
    launches: int = Field(default=1, ge=0)
    sides: tuple[int, int, int, int] | None = None

    @property
    def base_kind(self) -> str:
        """The class without its refinement; ``other`` where it is none of ``KINDS``."""
        base = self.kind.partition(".")[0]
        return base if base in KINDS else "other"


class CostModel(Protocol):
    """Anything that says how long an operation takes on its device."""

    def seconds(self, work: OpWork) -> float:
        """Return the time of ``work`` in seconds: finite, never negative, and no shorter for more of the same work."""
        ...
