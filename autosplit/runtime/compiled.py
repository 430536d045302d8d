"""A region that runs as ``torch.compile`` makes it, and by its own graph wherever that cannot be.

    call ──► seen to fail, or not to be compiled now ──► the region itself
         ──► torch.compile(region), as one graph ──► result
                    └── the compiler fails: nothing has run yet; the region itself runs, and a reason is kept

A compiled region is one graph (``fullgraph``), so a failure of the compiler comes before anything has run. The compiler
has a lock of its own; lanes that meet new shapes at the same time compile one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autosplit.runtime.lanes.ambient import is_transformed, watched

_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx.experimental")
_DRAWS = "it takes draws or statistics of the whole step"


class Compiled(nn.Module):
    """Runs a region compiled; copies and pickles have its region only, and compile anew.

    Attributes:
        region: the GraphModule; it is not registered here.
        place: what to call it in the report.
        options: the arguments of ``torch.compile``.
        reason: why it runs by its own graph; "" where it is compiled.
    """

    region: Any
    place: str
    options: Mapping[str, Any]
    reason: str

    def __init__(self, region: Any, place: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(region=region, place=place, options=options, making=threading.Lock(), made=None)
        self.__dict__["reason"] = _DRAWS if "key" in region.takes else ""

    def __reduce__(self) -> Any:
        return Compiled, (self.region, self.place, self.options)

    def forward(self, *given: Any) -> Any:
        """Run the region."""
        if self.reason or watched() or is_transformed():
            return self.region(*given)
        try:
            return self._code()(*given)
        except Exception as error:
            if not type(error).__module__.startswith(_COMPILERS):
                raise  # the model's own
            found = self.region(*given)
            self.__dict__["reason"] = f"{type(error).__name__}: {_short(error)}"
            return found

    def _code(self) -> Callable[..., Any]:
        with self.__dict__["making"]:
            if self.__dict__["made"] is None:
                self.__dict__["made"] = torch.compile(self.region.forward, fullgraph=True, **self.options)
            return self.__dict__["made"]


def _short(error: Exception) -> str:
    """Return what an exception says first; the compiler's own have a heading line, which ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
