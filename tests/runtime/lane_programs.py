"""Programs that autosplit emits, run on lanes of the test's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from autosplit.lower.place import place
from autosplit.lower.program import STATE, emit
from autosplit.lower.split import lower
from autosplit.options import Sample
from autosplit.planning.apply import assign
from autosplit.planning.sizes import sizes_of
from autosplit.runtime.lanes import Lane
from autosplit.runtime.ops import CallState, enter, leave, on_lane
from autosplit.schedule.gpipe import forward_only
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace


class Program:
    """A model's pipelined program with about as many nodes in each stage, and its parts bound to lanes."""

    def __init__(
        self,
        model: nn.Module,
        sample: tuple[Any, ...],
        lanes: Sequence[Lane],
        *,
        chunks: int,
        devices: Sequence[torch.device],
        wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage,
    ) -> None:
        traced = trace(model, Sample(*sample)).graph
        micro = [info.name for _, info in traced.compute_nodes() if info.node_class is NodeClass.MICRO]
        wanted = {name: index * len(lanes) // len(micro) for index, name in enumerate(micro)}
        self.lanes = tuple(lanes)
        self.lowered = lower(traced, assign(traced, wanted, stages=len(lanes)), devices)
        place(model, self.lowered, devices)
        self.sizes = sizes_of(len(sample[0]), chunks, 1)
        parts: dict[str, Any] = {}
        for stage, lane in enumerate(self.lanes):
            parts[f"stage{stage}"] = on_lane(wrap(self.lowered.stages[stage]), lane)
            if (prologue := self.lowered.prologues[stage]) is not None:
                parts[f"shared{stage}"] = on_lane(prologue, lane)
        if self.lowered.epilogue is not None:
            parts["epilogue"] = on_lane(self.lowered.epilogue, self.lanes[-1])
        self.module = fx.GraphModule(nn.Module(), fx.Graph())
        self.module.__dict__.update(parts)
        self.module.__dict__[STATE] = model
        order = forward_only(len(self.lowered.stages), len(self.sizes)).issue_order
        self.module.graph = emit(self.lowered, order=order, attributes={name: name for name in parts})

    def __call__(self, *tensors: torch.Tensor, caller: Lane) -> list[Any]:
        """Run the program on the whole batch and return the flat outputs."""
        flat: Sequence[Any] = ()
        enter(caller, self.lanes)
        try:
            flat = self.module(*tensors, sum(self.sizes), self.sizes, (*self.lanes, caller), CallState())
        finally:
            leave(caller, self.lanes, flat)
        return list(flat)
