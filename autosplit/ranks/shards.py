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


def total_norm(world: World, names: Iterable[str], parameters: Mapping[str, nn.Parameter], norm_type: float) -> Tensor:
    """Return the norm of all ranks' gradients; ``parameters`` are this rank's parameters with a gradient.

    Norms of single gradients are reduced in the order of ``names``, so the total has the bits of one process. That of
    one in shards is the norm of the shards' norms.
    """
    there = {name: (p, p.grad) for name, p in parameters.items() if p.grad is not None and not _is_empty(p.grad)}
    norms = {name: _norm(parameter, gradient, norm_type) for name, (parameter, gradient) in there.items()}
    every: dict[str, dict[Any, Tensor]] = defaultdict(dict)
    for told in world.gather("clips gradients", norms):
        for name, (shard, norm) in told.items():
            every[name][shard] = norm
    parts = [list(every[name].values()) for name in names if name in every]
    ordered = [
        norm if not more else torch.linalg.vector_norm(torch.stack([norm, *more]), norm_type) for norm, *more in parts
    ]
    return torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.tensor(0.0)


def _is_empty(gradient: Tensor) -> bool:
    """Tell whether a rank has a shard without elements, of which there is no norm of every order."""
    return isinstance(gradient, DTensor) and not gradient.to_local().numel()


def _norm(parameter: Tensor, gradient: Tensor, norm_type: float) -> tuple[Any, Tensor]:
    """Return the norm of what a rank has of a gradient, and which shard that is."""
    shard: Any = PARTS[parameter].sharing.rank if parameter in PARTS else None
    if isinstance(gradient, DTensor):
        coordinates = zip(gradient.device_mesh.get_coordinate() or (), gradient.placements, strict=True)
        shard = tuple(number for number, placement in coordinates if placement.is_shard())
        gradient = gradient.to_local()
    return shard, torch.linalg.vector_norm(gradient, norm_type).cpu()


def like(value: Any, local: Any) -> Any:
    """Return a whole value in shards as a rank's own is."""
    if isinstance(local, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
        value = value.to(local.device)
        return distribute_tensor(value, local.device_mesh, local.placements, src_data_rank=None)
    return value
