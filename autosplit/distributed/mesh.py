"""Which ranks belong together on a ``torch.distributed.DeviceMesh``.

A pipeline lies along "pp", its replicas along "dp", and along "tp" pipelines whose ranks share each stage's tensors.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import InputError, listed

_DIMENSIONS = ("dp", "dp_replicate", "dp_shard", "pp", "tp")
"""The second and third are those of HSDP, in the place of the first."""
_ORDER = ("tp", "dp", "dp_replicate", "dp_shard", "pp")

Layout = tuple[tuple[int, ...], ...]
"""By replica and by rank of its pipeline, the rank in ``torch.distributed``."""


def columns_of(mesh: Any) -> tuple[Layout, ...]:
    """Return the ranks of each replica, by place along "tp"; raise InputError for a mesh not of all processes."""
    if not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"mesh is a {type(mesh).__name__}; give a DeviceMesh, such as torch.distributed.device_mesh."
            "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'pp'))"
        )
    names = mesh.mesh_dim_names or ()
    table = mesh.mesh
    if len(names) != table.dim():
        raise InputError(f"the dimensions of mesh {list(table.shape)} have no names; give mesh_dim_names=('dp', 'pp')")
    if unknown := [name for name in names if name not in _DIMENSIONS]:
        raise InputError(f"mesh has a dimension {listed(unknown)}; known are {', '.join(_DIMENSIONS)}")
    if "dp" in names and len(replicas_of(mesh)) > 1:
        raise InputError(f"mesh has dimensions {listed(replicas_of(mesh))}; give dp, or dp_replicate and dp_shard")
    sizes = dict.fromkeys(_DIMENSIONS, 1) | dict(zip(names, table.shape, strict=True))
    size = dist.get_world_size()
    if sorted(table.flatten().tolist()) != list(range(size)):
        raise InputError(
            f"mesh {dict(zip(names, table.shape, strict=True))} has {table.numel()} ranks, and {size} processes were "
            "started; every process has one place in it"
        )
    ordered = table.permute([names.index(name) for name in _ORDER if name in names])
    columns = ordered.reshape(sizes["tp"], -1, sizes["pp"]).tolist()
    return tuple(tuple(map(tuple, column)) for column in columns)


def replicas_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the dimensions along which the replicas of a pipeline lie."""
    return tuple(name for name in mesh.mesh_dim_names or () if name.startswith("dp"))
