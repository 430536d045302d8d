"""LoRA and quantised bases as they are asked for: ``r=16,targets=q_proj+v_proj`` and ``nf4``; without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autosplit.checks import MASTERS, choose
from autosplit.errors import InputError

BASES = ("nf4", "int8")
"""How frozen linear weights are kept: bitsandbytes' 4 bits with double quantisation, or 8 bits with a scale per row."""
ALL_LINEAR = "all-linear"
LORA_FORM = "r=16,targets=q_proj+v_proj (or all-linear, the default), with alpha=, dropout= and dtype=bf16 if wanted"


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters beside linear layers (Hu et al. 2021, arXiv 2106.09685), with PEFT's words.

    Attributes:
        r: the rank.
        targets: ends of the names of the layers that get one; empty: all linear layers but the head.
        alpha: the product of A and B is scaled by alpha / r; None: by 1.
        dropout: the probability with which an adapter's inputs are dropped.
        dtype: what adapters of a layer in bf16, fp16 or fewer bits are in: "fp32", as PEFT makes them, or "bf16", as
            it does under ``autocast_adapter_dtype=False``.
    """

    r: int
    targets: tuple[str, ...] = ()
    alpha: float | None = None
    dropout: float = 0.0
    dtype: str = "fp32"

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Read ``r=16,targets=q_proj+v_proj,alpha=32,dropout=0.05``; InputError for what cannot be read."""
        readers: dict[str, Callable[[str], Any]] = {
            "r": int,
            "targets": _targets,
            "alpha": float,
            "dropout": float,
            "dtype": str,
        }
        try:
            pairs = [entry.split("=", 1) for entry in text.replace(" ", "").split(",")]
            given: dict[str, Any] = {name: readers[name](value) for name, value in pairs}
            lora = cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"lora={text!r} cannot be read; write {LORA_FORM}") from error
        if lora.r < 1 or not 0 <= lora.dropout < 1 or lora.dtype not in ("fp32", "bf16"):
            raise InputError(f"lora={text!r}: r is at least 1, dropout from 0 to less than 1, dtype fp32 or bf16")
        return lora

    def __str__(self) -> str:
        more = f",alpha={self.alpha:g}" if self.alpha is not None else ""
        more += f",dropout={self.dropout:g}" if self.dropout else ""
        more += f",dtype={self.dtype}" if self.dtype != "fp32" else ""
        return f"r={self.r},targets={'+'.join(self.targets) or ALL_LINEAR}{more}"


def _targets(text: str) -> tuple[str, ...]:
    return () if text == ALL_LINEAR else tuple(filter(None, text.split("+")))


@dataclass(frozen=True)
class Adapters:
    """What a frozen model gets: adapters, and how its linear weights are kept (None: as they are)."""

    lora: Lora | None
    base: str | None

    @property
    def words(self) -> dict[str, Any]:
        """The fields of a plan that say so."""
        return {"lora": None if self.lora is None else str(self.lora), "base": self.base}


def check_adapters(lora: Any, base: Any, precision: str | None, schedule: Any) -> tuple[Adapters | None, str | None]:
    """Return what is asked for (None for nothing), and the precision: adapters in fp32 are their own master weights.

    Raises InputError where it cannot be read or does not go together.
    """
    if lora is None and base is None:
        return None, precision
    choose("base", base, (None, *BASES))
    if not isinstance(lora, Lora | str | None):
        raise InputError(f"lora={lora!r} is no text; write {LORA_FORM}")
    if lora is None and schedule != "forward":
        raise InputError(f"base={base!r} freezes the model, so nothing trains; give lora= too, or schedule='forward'")
    if precision == "fp8":
        raise InputError("precision='fp8' trains products in fp8, which a frozen base has none of; give 'bf16'")
    adapters = Adapters(Lora.parse(lora) if isinstance(lora, str) else lora, base)
    return adapters, "bf16" if precision in MASTERS else precision
