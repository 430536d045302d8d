"""A model that no graph can follow, run by its own Python in one chunk: its units on their stages' devices.

Forward interceptors (trace/module_tree.py) tell units apart. Everything is ordinary autograd: outputs and gradients
have the plain model's graph.

State lies at home, values where they are used:

    at a door        a unit's inputs come to the unit's device
    anywhere         operands that lie on several devices meet: in a unit on its device, in the model's own Python on
                     the one that comes last among the stages; a parameter is copied once per call, and what an
                     operation changes in a copy is changed at home too

Copies are part of autograd's graph and pass through the lanes of the caller: on each device everything runs on the
caller's stream, as in a model that is spread by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from autosplit.runtime.lanes.lanes import Lane, caller_lane
from autosplit.runtime.ops import transfer
from autosplit.runtime.optimizers import move
from autosplit.trace.module_tree import ForwardInterceptors, homes

_APART = frozenset("to type_as copy_ set_ is_set_to __set__ backward".split())
"""Functions whose operands may lie on several devices, and for which that means something."""


class TreeRun:
    """Runs a model's own Python with its units on lanes' devices.

    Attributes:
        units: paths of the units.
    """

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int], lanes: Sequence[Lane]) -> None:
        """Move parameters and buffers to the devices of their stages.

        ``stage_of`` maps unit names (``blocks.2#0``) to stages, ``lanes`` has one per stage.
        """
        self._model = model
        self._stages = {name.partition("#")[0]: stage for name, stage in stage_of.items()}
        self.units = tuple(self._stages)
        self._doors = ForwardInterceptors(model, self.units)
        self._of_stage = [lane.device for lane in lanes]
        home = homes(model, self._stages)
        state = (*model.named_parameters(), *model.named_buffers())
        move((tensor, self._of_stage[home[name]]) for name, tensor in state)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward and return what it returns.

        Raises what the model raises, with a note that names the unit and the stage.
        """
        moves = Moves(self._of_stage)
        visit = _Visit(self._stages, moves)
        args, kwargs = moves.inputs((args, kwargs))
        with self._doors.up(), self._doors.visited(visit), moves.entered():
            return self._model.forward(*args, **kwargs)


class _Visit:
    """Stands at the doors during one call."""

    def __init__(self, stages: Mapping[str, int], moves: Moves) -> None:
        self.stages, self.moves = stages, moves
        self.failed: BaseException | None = None

    def __call__(self, path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self.stages[path]
        try:
            return self.moves.run(stage, plain, args, kwargs)
        except BaseException as error:
            if self.failed is not error:
                self.failed = error
                unit = f"unit {path!r}" if path else "the model itself"
                error.add_note(f"in {unit}, stage {stage}")
            raise


class Moves(TorchFunctionMode):
    """Moves values during one call: the operands of every operation meet on one device.

    ``of_stage`` are the devices of the stages.
    """

    def __init__(self, of_stage: Sequence[torch.device]) -> None:
        super().__init__()
        self.of_stage = of_stage
        self.order = {device: stage for stage, device in enumerate(of_stage)}
        """The last stage on every device: values move forwards."""
        self.copies: dict[tuple[Any, ...], torch.Tensor] = {}
        self.unit: torch.device | None = None
        """The device of the unit that is running."""

    def inputs(self, given: Any) -> Any:
        """Return a call's inputs, brought to the first stage's device if none of them is on a stage's.

        Beside inputs that are, others stay: what the model itself keeps elsewhere, such as lengths on the CPU.
        """
        found = {leaf.device for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)}
        if not found or found & self.order.keys():
            return given
        first = self.of_stage[0]
        return pytree.tree_map_only(torch.Tensor, lambda tensor: moved(tensor, first), given)

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the model's own Python; where there is one device only the inputs may have to move."""
        return self if len(self.order) > 1 else contextlib.nullcontext()

    def run(self, stage: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit on its device."""
        before, self.unit = self.unit, self.of_stage[stage]
        try:
            if len(self.order) > 1:
                args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: self._at(t, self.unit), (args, kwargs))
            return plain(*args, **kwargs)
        finally:
            self.unit = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {tensor.device for tensor in tensors} & self.order.keys()
        if len(places) < 2 or name in _APART:
            return func(*args, **kwargs)
        target = self._meeting(name, args, kwargs, tensors)
        changed: list[tuple[torch.Tensor, torch.Tensor, int]] = []

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            here = self._at(tensor, target)
            if here is not tensor and not here.is_inference():
                changed.append((tensor, here, here._version))
            return here

        args, kwargs = pytree.tree_map_only(torch.Tensor, bring, (args, kwargs))
        result = func(*args, **kwargs)
        for tensor, here, version in changed:
            if here._version != version:
                tensor.copy_(here)
        return result

    def _meeting(self, name: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> torch.device:
        """Return where an operation runs: what it changes stays; else values move forwards and parameters follow."""
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor):
            return out.device
        if _is_in_place(name) and isinstance(args[0], torch.Tensor):
            return args[0].device
        if self.unit is not None:
            return self.unit
        values = [tensor for tensor in tensors if tensor.device in self.order]
        values = [tensor for tensor in values if not isinstance(tensor, nn.Parameter)] or values
        return max((tensor.device for tensor in values), key=self.order.__getitem__)

    def _at(self, tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        if device is None or tensor.device == device or tensor.device not in self.order:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return moved(tensor, device)
        key = id(tensor), device, tensor._version, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if key not in self.copies:
            self.copies[key] = moved(tensor, device)
        return self.copies[key]


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on another device, inside autograd."""
    return transfer((tensor,), caller_lane(tensor.device), caller_lane(device))[0]
