"""``--input`` as text: a name or a position, a dtype, a shape, a limit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autosplit.errors import InputError

DTYPES = "float32 float64 float16 bfloat16 complex64 complex128 bool int64 int32 int16 int8 uint8".split()
INPUT_FORM = "NAME=dtype[shape], for example x=float32[8,3,32,32] or input_ids=int64[4,128]<50257"
_LIMITS = {"int64": 2**63 - 1, "int32": 2**31, "int16": 2**15, "int8": 2**7, "uint8": 2**8}
"""The largest limit of an integer dtype: values lie below it, and one below int64's own is as far as torch draws."""


@dataclass(frozen=True)
class InputSpec:
    """One ``--input``: a name or a position, a dtype, a shape, and for integers the limit below which values lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    limit: int | None = None

    def __str__(self) -> str:
        below = "" if self.limit is None else f"<{self.limit}"
        return f"{self.name}={self.dtype}[{','.join(map(str, self.shape))}]{below}"

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read ``x=float32[8,3,32,32]``, ``0=int64[4,128]<50257``; raises InputError for anything else."""
        form = r"\s*(?P<name>[^\W\d]\w*|0|[1-9][0-9]*)=(?P<dtype>\w+)\[(?P<shape>[0-9 ,]*)\](?:<(?P<limit>[0-9]+))?\s*"
        match = re.fullmatch(form, text)
        sizes = [size.strip() for size in match["shape"].split(",")] if match and match["shape"].strip() else []
        if match is None or not all(size.isdecimal() for size in sizes):
            raise InputError(f"--input {text!r} cannot be read; write {INPUT_FORM}")
        if match["dtype"] not in DTYPES:
            raise InputError(f"--input {text!r}: {match['dtype']!r} is no dtype here; valid: {', '.join(DTYPES)}")
        spec = cls(
            match["name"], match["dtype"], tuple(map(int, sizes)), int(match["limit"]) if match["limit"] else None
        )
        return spec._checked()

    def _checked(self) -> InputSpec:
        if self.limit is None:
            return self
        if self.dtype not in _LIMITS:
            raise InputError(f"--input {str(self)!r}: <{self.limit} is for integers, {self.dtype} takes no limit")
        largest = _LIMITS[self.dtype]
        if not 1 <= self.limit <= largest:
            raise InputError(f"--input {str(self)!r}: the limit of {self.dtype} is between 1 and {largest}")
        return self
