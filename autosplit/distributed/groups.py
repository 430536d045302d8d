"""Process groups that their members alone make.

    torch.distributed.new_group    all ranks make every group, since a group is named by how many there have been
    new_group here                 a group is named by its ranks and its purpose, and nobody else knows of it

So a rank makes the groups of its neighbours, whatever the number of ranks. Where the default group has a device
(``init_process_group(device_id=)``), torch splits NCCL's communicators from a parent's, in which all ranks of that take
part, one call for groups that have no rank in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from autosplit.errors import DeviceError


def carries(group: Any, kind: str) -> bool:
    """Tell whether a group sends tensors of a kind of device."""
    return kind in _backends(group)


def mesh_group(mesh: Any, ranks: Sequence[int], kind: str) -> Any:
    """Return the group of a mesh that has these ranks, in this order, and carries tensors of a kind of device.

    None: it has none. The default group is none of a mesh.
    """
    groups = [] if mesh is None else [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]
    fits = (group for group in groups if dist.get_process_group_ranks(group) == [*ranks] and carries(group, kind))
    return next(fits, None)


def new_group(purpose: str, rows: Sequence[Sequence[int]], kind: str, parent: Any = None) -> Any:
    """Return this rank's group among those of some rows, its ranks in their order; None where it is in no row.

    Groups carry tensors of a kind of device. ``rows`` are of ranks of ``torch.distributed``, and have none in common.
    All ranks of ``parent`` call it alike; None: of the default group.
    ``purpose`` tells a group from others of the same ranks.
    """
    default: Any = dist.group.WORLD
    row = next((list(row) for row in rows if dist.get_rank() in row), None)
    backend = _backends(default).get(kind, "gloo")
    if backend != "gloo" and default.bound_device_id is not None:
        return _split(purpose, rows, f"{kind}:{backend}", parent or default)
    if row is None:
        return None
    name: Any = f"autosplit {purpose} {'_'.join(map(str, row))}"
    group, _ = _new_process_group_helper(
        len(row),
        row.index(dist.get_rank()),
        row,
        dist.Backend(backend),
        default.get_group_store(),
        name,
        timeout=default_timeout(backend == "nccl"),
        group_desc=f"autosplit {purpose}",
    )
    _world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(row)}
    return group


def default_timeout(nccl: bool) -> timedelta:
    """Return torch's timeout of a group for which nobody has set one."""
    return (default_pg_nccl_timeout if nccl else None) or default_pg_timeout


def _split(purpose: str, rows: Sequence[Sequence[int]], backend: str, parent: Any) -> Any:
    if any(list(row) != sorted(row) for row in rows):
        raise DeviceError(
            "the mesh's ranks do not ascend along a dimension, and NCCL sorts those of a group that is split from one "
            "with a device; leave device_id= out of init_process_group, or number the mesh in ascending order"
        )
    inside = [[dist.get_group_rank(parent, number) for number in row] for row in rows]
    return dist.split_group(parent, inside, group_desc=f"autosplit {purpose}", backend=backend)


def _backends(group: Any) -> dict[str, str]:
    """Return the name of a group's backend by the kind of device."""
    config: str = dist.get_backend_config(group)
    return dict(entry.split(":") for entry in config.split(","))
