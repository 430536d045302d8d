"""Run a model whose parameters lie on several devices, one operation after the other, where its parameters are.

x (cuda:0) ─► linear, weight on cuda:1: x is brought to cuda:1, and its gradient back
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from autosplit.trace.inputs.structure import tensors_in


class Together(TorchFunctionMode):
    """Bring the operands of every operation to one device: that of a parameter, of what is written, or of the last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = tensors_in((args, kwargs))
        if len({tensor.device for tensor in operands}) > 1:
            device = self._device(func, operands)
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return func(*args, **kwargs)

    def _device(self, func: Any, operands: list[torch.Tensor]) -> torch.device:
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            return operands[0].device
        held = [tensor.device for tensor in operands if id(tensor) in self._state]
        larger = [tensor.device for tensor in operands if tensor.dim()]
        return held[0] if held else (larger or [operands[-1].device])[-1]
