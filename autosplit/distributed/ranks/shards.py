"""Parameters of which a rank has a shard: the norm of all gradients, and values that are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autosplit.distributed.world import World
from autosplit.tensor.part import PARTS, ShardLayout


class _Held(NamedTuple):
    """A gradient of a rank: its column where that has a part over "tp", and which shard of a replica it is."""

    name: str
    dtype: torch.dtype
    column: int | None
    shard: tuple[int, ...]


class _Layout(NamedTuple):
    """Where the norms of a rank's gradients stand among those of all, in the model's order.

    Attributes:
        size: the number of gradients.
        dtype: what torch would compute the norm of all norms in.
        indices: of this rank's gradients.
        first: which of all norms this rank says in its pipeline.
        replicas: of which ones replicas have shards, and which of these this rank adds; None: there are no shards.
        columns: of which ones columns have parts; None: there are none.
    """

    size: int
    dtype: torch.dtype
    indices: Tensor
    first: Tensor
    replicas: tuple[Tensor, Tensor] | None
    columns: Tensor | None


class GradientNorms:
    """The norm of all ranks' gradients, which stays on their device.

        rank         norms of its gradients, each at its index in the model's order
        tp, dp       parts and shards: powers of norms ── all_reduce ──► the norm of the whole
        pipeline     zeros for what another rank has ── all_reduce ──► all norms ─► the norm of them

    So the total has the bits of one process where nothing is in parts. Ranks meet where one has gradients of other
    parameters than before, and else vote.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: list[_Held] | None = None
        self._layout: _Layout | None = None
        self._meetings = 0

    def total(self, names: Iterable[str], parameters: Mapping[str, nn.Parameter], norm_type: float) -> Tensor:
        """Return the norm; ``names`` are the model's, and ``parameters`` those of this rank with a gradient."""
        world, doing = self._world, "clips gradients"
        held = [_held(name, parameter) for name, parameter in parameters.items()]
        if held != self._held or not world.vote(doing, -1, self._meetings):
            rows = world.gather(doing, held)
            self._held, self._layout, self._meetings = held, self._layout_of(names, rows), self._meetings + 1
        layout = self._layout
        assert layout is not None
        norms = torch.zeros(layout.size, dtype=torch.float64, device=world.device)
        if parameters:
            gradients = [_local(parameter) for parameter in parameters.values()]
            norms[layout.indices] = torch.stack(torch._foreach_norm(gradients, norm_type)).double()
        if layout.columns is not None:
            norms = self._of_whole(norms, layout.columns, layout.columns, world.tensor, norm_type)
        if layout.replicas is not None:
            norms = self._of_whole(norms, *layout.replicas, world.across, norm_type)
        norms = torch.where(layout.first, norms, 0.0)
        world.combine("norms of gradients", norms, world.payload)
        return torch.linalg.vector_norm(norms.to(layout.dtype), norm_type)

    def _of_whole(self, norms: Tensor, in_parts: Tensor, added: Tensor, group: Any, norm_type: float) -> Tensor:
        """Return the norms of whole gradients, where ranks of a group have those of parts."""
        op = {torch.inf: dist.ReduceOp.MAX, -torch.inf: dist.ReduceOp.MIN}.get(norm_type, dist.ReduceOp.SUM)
        power = norm_type if op == dist.ReduceOp.SUM and norm_type else 1.0
        combined = torch.where(added, norms**power, 0.0) if op == dist.ReduceOp.SUM else norms.clone()
        self._world.combine("norms of gradients", combined, group, op)
        return torch.where(in_parts, combined ** (1 / power), norms)

    def _layout_of(self, names: Iterable[str], rows: list[list[_Held]]) -> _Layout:
        world = self._world
        mine, there = rows[world.number], {held.name for row in rows for held in row}
        order = {name: index for index, name in enumerate(name for name in names if name in there)}
        first: dict[Any, int] = {}
        first |= {held.name: number for number in reversed(world.members) for held in rows[number]}
        holders = sorted(world.holders(world.rank), reverse=True)
        first |= {(held.name, held.shard): number for number in holders for held in rows[number]}

        def mask(marked: Iterable[str]) -> Tensor:
            every = set(marked)
            return torch.tensor([name in every for name in order], dtype=torch.bool, device=world.device)

        dtypes = {held.dtype for row in rows for held in row}
        shards = [held for held in mine if held.shard]
        added = [held.name for held in shards if first[held.name, held.shard] == world.number]
        return _Layout(
            len(order),
            reduce(torch.promote_types, dtypes) if dtypes else torch.float32,
            torch.tensor([order[held.name] for held in mine], dtype=torch.int64, device=world.device),
            mask(held.name for held in mine if first[held.name] == world.number),
            (mask(held.name for held in shards), mask(added)) if shards else None,
            mask(held.name for held in mine if held.column is not None) if world.tensor is not None else None,
        )


def _held(name: str, parameter: nn.Parameter) -> _Held:
    gradient, column = parameter.grad, PARTS[parameter].sharing.rank if parameter in PARTS else None
    shard: tuple[int, ...] = ()
    if isinstance(gradient, DTensor):
        coordinates = zip(gradient.device_mesh.get_coordinate() or (), gradient.placements, strict=True)
        shard = tuple(number for number, placement in coordinates if placement.is_shard())
    assert gradient is not None
    return _Held(name, gradient.dtype.to_real(), column, shard)


def _local(parameter: nn.Parameter) -> Tensor:
    """Return what a rank has of a gradient; a zero for a shard without elements, which has no norm of every order."""
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    assert local is not None
    return local if local.numel() else local.new_zeros(1)


def like(value: Any, local: Any) -> Any:
    """Return a whole value, or this rank's shard of it, in shards as a rank's own is."""
    if isinstance(local, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
        value = value.detach().to(local.device)
        if value.shape == local.to_local().shape:
            return ShardLayout.of(local).around(value)
        return distribute_tensor(value, local.device_mesh, local.placements, src_data_rank=None)
    return value
