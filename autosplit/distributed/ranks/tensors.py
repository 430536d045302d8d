"""Tensor parallelism of a pipe: the plan that all columns follow, and what this one runs and holds of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from autosplit.distributed.ranks.parallelize import Parallelize
from autosplit.distributed.world import World
from autosplit.errors import InputError, TraceError
from autosplit.profile.node_costs.shadow import shadow
from autosplit.tensor.axes import Shard
from autosplit.tensor.build import rank_recording
from autosplit.tensor.collectives import Sharing
from autosplit.tensor.local import draws_in_parts
from autosplit.tensor.part import PARTS, Part
from autosplit.tensor.plan import TensorPlan, check_sharded, tensor_plan
from autosplit.trace.graph import TracedGraph


class TensorParallel:
    """How parameters lie over the columns; the first recording decides.

    Attributes:
        plan: that of the first recording; None before it.
    """

    def __init__(self, world: World, *, plain_numbers: bool) -> None:
        self._plain_numbers = plain_numbers
        self._sharing = Sharing(world.column, world.tensor_ranks, world.tensor, world.with_others)
        self.plan: TensorPlan | None = None
        self._planned: tuple[TracedGraph, TensorPlan] | None = None
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        """Parameters that were cut since the last end of a preparation, with their values and gradients."""

    def recording(self, traced: TracedGraph, rows: int) -> TracedGraph:
        """Return what this column runs of a recording of the whole model."""
        return rank_recording(traced, self._plan(traced, rows), self._sharing, plain_numbers=self._plain_numbers)

    def alone(self, traced: TracedGraph, rows: int) -> TracedGraph:
        """Return the same on parts of its own, without collectives: what a rank computes, for the plan."""
        plan = self._plan(traced, rows)
        alone = Sharing(self._sharing.rank, plan.ranks, alone=True)
        recording = rank_recording(traced, plan, alone, plain_numbers=self._plain_numbers)
        names = {id(tensor): name for name, tensor in traced.root.named_parameters(remove_duplicate=False)}

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            shard = self._part_of(names.get(id(tensor), ""), tensor.size())
            return tensor if shard is None else nn.Parameter(shard.of(tensor.detach()), tensor.requires_grad)

        return replace(recording, root=shadow(recording.root, replace=kept).module)

    def _plan(self, traced: TracedGraph, rows: int) -> TensorPlan:
        if self._planned is not None and self._planned[0] is traced:
            return self._planned[1]
        draws, pins = draws_in_parts(traced, plain=self._plain_numbers), None
        if self.plan is not None:
            pins = {n: layout.dim if isinstance(layout, Shard) else None for n, layout in self.plan.parameters.items()}
        plan = tensor_plan(traced, ranks=self._sharing.ranks, rows=rows, pins=pins, draws=draws)
        if self.plan is None:
            check_sharded(plan)
            self.plan = plan
        read = {key.removeprefix(".") for node in plan.nodes.values() for key in node.wants if key.startswith(".")}
        read &= plan.parameters.keys()
        moved = next((n for n in sorted(read) if plan.parameters[n] != self.plan.parameters[n]), None)
        if moved is not None:
            raise TraceError(
                f"{moved!r} is {self.plan.parameters[moved]} over tp, and this kind of call can only use it as "
                f"{plan.parameters[moved]}; plan on a sample of this kind of call, or leave tp out"
            )
        self._planned = traced, plan
        return plan

    def notes(self) -> str:
        """Return which matrices every column has whole, and why."""
        if self.plan is None:
            return ""
        lines = [f"\nwhole on all {self.plan.ranks} ranks of tp: {n}: {why}" for n, why in self.plan.replicated.items()]
        return "".join(lines)

    def kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return what this column keeps of a parameter's or buffer's value."""
        shard = self._part_of(name, value.size())
        return value if shard is None else shard.of(value)

    def cut(self, named: Mapping[str, torch.Tensor], sizes: Mapping[str, torch.Size]) -> None:
        """Leave this column's parts in parameters; ``sizes`` are those of the whole."""
        for name, tensor in named.items():
            shard = None if tensor in PARTS else self._part_of(name, sizes[name])
            if shard is None:
                continue
            if tensor.size() == shard.size:
                _check_hooks(name, tensor)
                self._before.append((tensor, tensor.data, tensor.grad))
                tensor.data = shard.of(tensor.data)
                tensor.grad = None if tensor.grad is None else shard.of(tensor.grad)
            PARTS[tensor] = shard

    def end(self, *, failed: bool) -> None:
        """End a preparation: a model for which that failed is whole again."""
        for tensor, value, gradient in self._before if failed else ():
            PARTS.pop(tensor, None)
            tensor.data, tensor.grad = value, gradient
        self._before.clear()

    def _part_of(self, name: str, size: torch.Size) -> Part | None:
        assert self.plan is not None
        shard = self.plan.parameters.get(name)
        return Part(shard, size, self._sharing) if isinstance(shard, Shard) else None


def _check_hooks(name: str, parameter: torch.Tensor) -> None:
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise InputError(
            f"{name!r} has a hook on its gradient, which would get a part of it; register it after autosplit, if it "
            "works element by element"
        )


def check_columns(ranks: int, *, feed: str, parallelize: Parallelize | None) -> InputError | None:
    """Return an error for what ranks that share tensors cannot do."""
    if ranks == 1:
        return None
    if parallelize is not None and parallelize.whole:
        return InputError(
            f"parallelize={parallelize.name!r} wraps whole blocks, and tp={ranks} shares what lies inside of them; "
            "give parallelize='fsdp', or a mesh without tp"
        )
    if feed != "all":
        return InputError(f"feed={feed!r} is for a mesh without tp; give every rank of a replica its batch")
    return None
