"""Joining the processes that torchrun has started: their groups, their devices, and which of them are one pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from autosplit.distributed.mesh import Layout, columns_of
from autosplit.distributed.watch import Watch
from autosplit.distributed.world import World
from autosplit.errors import DeviceError

_JOINED: dict[tuple[Any, str, tuple[Layout, ...]], World] = {}
"""The worlds of the default process group, each made once, by the kind of device and the columns."""


def meet(doing: str) -> World | None:
    """Return the world of ranks that have joined; raise on every rank where they are about to do different things."""
    for key, world in _JOINED.items():
        if key[0] is dist.group.WORLD:
            world.gather(doing, None)
            return world
    return None


def join(mesh: Any = None) -> World:
    """Return this process's world; initialise torch.distributed by torchrun's environment where nobody has.

    ``mesh`` says which ranks are one pipeline, and what their devices are; None: all are one.

    Raises DeviceError where the process was not started as one of several, and where two ranks have one device;
    InputError for a mesh that is not of these processes.
    """
    if not dist.is_available():
        raise DeviceError("devices='torchrun' needs torch.distributed, which this torch is built without")
    columns = None if mesh is None else columns_of(mesh)  # which its processes are initialised for
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise DeviceError(
                f"devices='torchrun' is for a process that torchrun has started, and {', '.join(missing)} is not set; "
                "run torchrun --nproc-per-node N script.py, or call torch.distributed.init_process_group first"
            )
        store, rank, size = next(rendezvous("env://"))
        attempt_number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart may get the former one's store
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=PrefixStore(attempt_number, store), rank=rank, world_size=size)
    default, columns = dist.group.WORLD, columns or ((tuple(range(dist.get_world_size())),),)
    kind = "cuda" if torch.cuda.is_available() and (mesh is None or mesh.device_type != "cpu") else "cpu"
    if any(key[0] is not default for key in _JOINED):
        _JOINED.clear()
    if (default, kind, columns) not in _JOINED:
        _JOINED[default, kind, columns] = _joined(kind, columns)
    return _JOINED[default, kind, columns]


def _joined(kind: str, columns: tuple[Layout, ...]) -> World:
    number, size = dist.get_rank(), dist.get_world_size()
    known = next(iter(_JOINED.values()), None)
    watch = Watch(number, size) if known is None else known.watch
    everyone = dist.new_group(backend="gloo") if known is None else known.everyone
    device = _device(kind, number)
    all_ranks = tuple(range(size))
    payload = everyone if kind == "cpu" else dist.group.WORLD
    one = ((all_ranks,),)
    world = World(0, number, one, 0, device, everyone, everyone, payload, watch)
    words = world.agree("joins", {"their meshes": f"{columns}"}, word=(os.uname().nodename, str(device), kind != "cpu"))
    _check_devices(words, device)
    column = next(place for place, layout in enumerate(columns) if any(number in members for members in layout))
    layout = columns[column]
    names = [words[number][0] for number in layout[0]]
    order = list(dict.fromkeys(names))
    world = replace(world, hosts=tuple(order.index(name) for name in names))
    if columns == one:
        return world
    replica = next(place for place, members in enumerate(layout) if number in members)
    pipelines = [members for own in columns for members in own]
    held = [ranks for own in columns for ranks in zip(*own, strict=True)]
    sharing = list(zip(*([rank for members in own for rank in members] for own in columns), strict=True))
    across = _group_of(number, held, None) if len(layout) > 1 else None
    tensor = _group_of(number, sharing, None) if len(columns) > 1 else None
    control = _group_of(number, pipelines, "gloo")
    payload = control if kind == "cpu" else _group_of(number, pipelines, None)
    rank = layout[replica].index(number)
    world = replace(world, replica=replica, rank=rank, columns=columns, column=column)
    return replace(world, control=control, payload=payload, across=across, tensor=tensor)


def _group_of(number: int, rows: Iterable[Sequence[int]], backend: str | None) -> Any:
    """Return the group of a rank among those that all ranks make, one of each row."""
    made = [(row, dist.new_group(row, backend=backend)) for row in map(list, rows)]
    return next(group for row, group in made if number in row)


def _check_devices(places: list[Any], device: torch.device) -> None:
    """Raise DeviceError on every rank where two have one device, or torch.distributed cannot send what lies there."""
    config = dist.get_backend_config(dist.group.WORLD)
    for other, place in enumerate(places):
        if place[2] and places.index(place) != other:
            raise DeviceError(
                f"ranks {places.index(place)} and {other} have one device, {place[1]} of {place[0]}; start as many "
                "processes per host as it has devices"
            )
    if device.type != "cpu" and device.type not in config:
        raise DeviceError(
            f"this process has {device}, and torch.distributed was initialised with {config}, which carries no "
            f"{device.type} tensors; initialise it with 'cpu:gloo,cuda:nccl', or leave that to autosplit"
        )
    if len({place[2] for place in places}) > 1:
        raise DeviceError("some ranks have a CUDA device and others have none; give every rank a device of one kind")


def _device(kind: str, rank: int) -> torch.device:
    """Return the device of this process; one of CUDA becomes its current device."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % count)) % count)
    torch.cuda.set_device(device)
    return device
