"""What norm layers take their statistics over: watched in one run, repeated in another.

    pipe     bn1: 3 rows, 3 rows, 2 rows     a training BatchNorm sees each microbatch by itself
    model    bn1: 8 rows ─► 3, 3, 2          its own forward on the whole batch, only its norms in the same pieces

Nothing else of the model's forward changes then, so that the two runs have equal numbers.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_FLAGS: dict[Callable[..., Any], str] = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}
_SIGNATURES = {function: inspect.signature(function) for function in _FLAGS}


@dataclass(frozen=True)
class Piece:
    """One call of a norm that took statistics: the size of its first dimension, and its momentum."""

    size: int
    momentum: float | None


class NormWatch(TorchFunctionMode):
    """Lists the calls of norms that take statistics over the batch; with ``pieces`` it cuts them up.

    Enter it when the model holds the tensors that it will run with: norms are told apart by those.

    Attributes:
        calls: for each norm, named by its first tensor, the pieces in the order of the calls.
        cut: names of the norms whose calls were cut up, with the number of pieces.
    """

    def __init__(self, model: nn.Module, pieces: Mapping[str, Sequence[Piece]] | None = None) -> None:
        super().__init__()
        self.calls: dict[str, list[Piece]] = defaultdict(list)
        self.cut: dict[str, int] = {}
        self._pieces = pieces or {}
        tensors = (*model.named_buffers(), *model.named_parameters())
        self._names = {tensor.data_ptr(): name for name, tensor in tensors if tensor.numel()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FLAGS:
            return func(*args, **kwargs)
        bound = _SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = dict(bound.arguments)
        state = named["running_mean"] is not None
        if not named[_FLAGS[func]] or (func is F.instance_norm and not state):
            return func(**named)
        holder = named["running_mean"] if state else named["weight"]
        name = "a norm without state" if holder is None else self._names.get(holder.data_ptr(), "an unknown norm")
        size = named["input"].shape[0]
        self.calls[name].append(Piece(size, named["momentum"]))
        pieces = self._own_pieces(name, size)
        if len(pieces) < 2:
            return func(**named)
        self.cut[name] = len(pieces)
        parts = named["input"].split([piece.size for piece in pieces])
        done = [func(**named | {"input": x, "momentum": p.momentum}) for x, p in zip(parts, pieces, strict=True)]
        return torch.cat(done)

    def _own_pieces(self, name: str, size: int) -> Sequence[Piece]:
        """Return the pieces of this call; those of a norm that is called several times in a forward take turns."""
        pieces = self._pieces.get(name, ())
        total = sum(piece.size for piece in pieces)
        uses, rest = divmod(total, size)
        if rest or not uses:
            return ()
        mine = pieces[(len(self.calls[name]) - 1) % uses :: uses]
        return mine if sum(piece.size for piece in mine) == size else ()
