"""Runs a graph on the CPU, wherever its tensors lie and wherever it was recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

_CPU = torch.device("cpu")


class OnCpu(fx.Interpreter):
    """An interpreter whose calls make their tensors on the CPU."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with the CPU in the place of any device."""
        return super().call_function(target, *devices_to_cpu((args, kwargs)))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a method with the CPU in the place of any device."""
        return super().call_method(target, *devices_to_cpu((args, kwargs)))


def devices_to_cpu(value: Any) -> Any:
    """Return arguments with the CPU in the place of any device."""
    return map_aggregate(value, lambda leaf: _CPU if isinstance(leaf, torch.device) else leaf)


def to_cpu(value: Any) -> Any:
    """Return the values of a tensor on the CPU; anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) and value.device != _CPU else value
