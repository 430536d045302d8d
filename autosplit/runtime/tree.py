"""A model that no graph can follow, run by its own Python in one chunk, its state spread over the stages' devices.

Everything is ordinary autograd: outputs and gradients have the plain model's graph. State lies at home and values come
to it, by copies that are part of the graph; on each device everything runs on the caller's stream, as in a model that
is spread by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.optimizers import move
from autosplit.trace.inputs.objects import tensors_in
from autosplit.trace.module_tree import homes

_APART = frozenset("to type_as copy_ set_ is_set_to __set__ backward".split())
"""Functions whose operands may lie on several devices, and for which that means something."""


class TreeRun:
    """Runs a model's own Python, its modules on the devices of lanes."""

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int], lanes: Sequence[Lane]) -> None:
        """Move tensors to their stages; ``stage_of`` maps unit names (``blocks.2#0``), ``lanes`` has one per stage."""
        self._model = model
        self._devices = [lane.device for lane in lanes]
        home = homes(model, {name.partition("#")[0]: stage for name, stage in stage_of.items()})
        state = (*model.named_parameters(), *model.named_buffers())
        move((tensor, self._devices[home[name]]) for name, tensor in state)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward and return what it returns."""
        return Together(self._model, self._devices).call(self._model.forward, *args, **kwargs)


class Together(TorchFunctionMode):
    """Brings the operands of every operation to one of a model's devices, given in the order of its layers.

    That is the device of what is written, else that of a parameter or buffer, else the last one, as values move
    forwards. What lies elsewhere, such as lengths on the CPU, stays there.
    """

    def __init__(self, model: nn.Module, devices: Iterable[torch.device]) -> None:
        super().__init__()
        self._state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._order = {device: index for index, device in enumerate(devices)}

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the model's inputs, brought to the first device if none of them is on any of these."""
        first, tensors = next(iter(self._order)), tensors_in((args, kwargs))
        if not any(tensor.device in self._order for tensor in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(first), (args, kwargs))
        with self if len(self._order) > 1 else contextlib.nullcontext():
            return function(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        operands = [tensor for tensor in tensors_in((args, kwargs)) if tensor.device in self._order]
        if len({tensor.device for tensor in operands}) < 2 or name in _APART:
            return func(*args, **kwargs)
        device = self._meeting(name, operands, kwargs.get("out"))
        copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == device or tensor.device not in self._order:
                return tensor
            here = tensor.to(device)
            if not here.is_inference():
                copies.append((tensor, here, here._version))
            return here

        args, kwargs = pytree.tree_map_only(torch.Tensor, bring, (args, kwargs))
        result = func(*args, **kwargs)
        for tensor, here, version in copies:
            if here._version != version:  # what an operation changes in a copy is changed at home too
                tensor.copy_(here)
        return result

    def _meeting(self, name: str, operands: Sequence[torch.Tensor], out: Any) -> torch.device:
        """Return where an operation runs."""
        if isinstance(out, torch.Tensor):
            return out.device
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i"):
            return operands[0].device
        held = [tensor for tensor in operands if id(tensor) in self._state] or operands
        return max((tensor.device for tensor in held), key=self._order.__getitem__)
