"""A model that no graph can follow, run by its own Python in one chunk: its units on their stages' devices.

Units are told apart by doors (trace/module_tree.py). Everything is ordinary autograd: outputs and gradients have the
plain model's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from autosplit.runtime.lanes import Lane
from autosplit.runtime.tree_devices import Devices, Moves
from autosplit.trace.module_tree import ForwardInterceptors


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
        self._devices = Devices(model, self._stages, lanes)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward and return what it returns.

        Raises what the model raises, with a note that names the unit and the stage.
        """
        moves = self._devices.call()
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
