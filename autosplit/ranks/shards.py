"""Parameters of which a rank has a shard: the norm of all gradients, and values that are loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autosplit.distributed.world import World
from autosplit.tensor.part import PARTS


def total_norm(world: World, names: Iterable[str], own: Mapping[str, nn.Parameter], norm_type: float) -> Tensor:
    """Return the norm of all ranks' gradients; ``own`` are this rank's parameters with a gradient.

    Norms of single gradients are reduced in the order of ``names``, so the total has the bits of one process. That of
    one in shards is the norm of the shards' norms.
    """
    there = {name: (p, p.grad) for name, p in own.items() if p.grad is not None and not _is_empty(p.grad)}
    norms = {name: _norm(parameter, gradient, norm_type) for name, (parameter, gradient) in there.items()}
    every: dict[str, dict[Any, Tensor]] = defaultdict(dict)
    for found in world.gather("clips gradients", norms):
        for name, (place, norm) in found.items():
            every[name][place] = norm
    parts = [list(every[name].values()) for name in names if name in every]
    ordered = [
        one if not more else torch.linalg.vector_norm(torch.stack([one, *more]), norm_type) for one, *more in parts
    ]
    return torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.tensor(0.0)


def _is_empty(gradient: Tensor) -> bool:
    """Tell whether a rank has a shard without elements, of which there is no norm of every order."""
    return isinstance(gradient, DTensor) and not gradient.to_local().numel()


def _norm(parameter: Tensor, gradient: Tensor, norm_type: float) -> tuple[Any, Tensor]:
    """Return the norm of what a rank has of a gradient, and which shard that is."""
    place: Any = PARTS[parameter].sharing.rank if parameter in PARTS else None
    if isinstance(gradient, DTensor):
        coordinates = zip(gradient.device_mesh.get_coordinate() or (), gradient.placements, strict=True)
        place = tuple(number for number, placement in coordinates if placement.is_shard())
        gradient = gradient.to_local()
    return place, torch.linalg.vector_norm(gradient, norm_type).cpu()


def like(value: Any, own: Any) -> Any:
    """Return a whole value in shards as a rank's own is."""
    if isinstance(own, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
        value = value.to(own.device)
        return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    return value
