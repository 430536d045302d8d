"""Joining the processes that torchrun has started: their groups, their devices, and which of them are one pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from autosplit.distributed.groups import carries, mesh_group, new_group
from autosplit.distributed.mesh import Layout, columns_of
from autosplit.distributed.watch import Watch
from autosplit.distributed.world import World
from autosplit.errors import DeviceError

_JOINED: dict[tuple[Any, str, tuple[Layout, ...]], World] = {}
"""The worlds of the default process group, each made once, by the kind of device and the columns."""

_FEW = 16
"""Up to so many ranks gather what they tell each other in one group, which is fewer calls; more along the mesh."""


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
        _JOINED[default, kind, columns] = _joined(kind, columns, mesh)
    return _JOINED[default, kind, columns]


def _joined(kind: str, columns: tuple[Layout, ...], mesh: Any) -> World:
    number, size = dist.get_rank(), dist.get_world_size()
    known = next(iter(_JOINED.values()), None)
    watch = Watch(number, size) if known is None else known.watch
    everyone = dist.group.WORLD if carries(dist.group.WORLD, "cpu") else dist.new_group(backend="gloo")
    device = _device(kind, number)
    world = World(0, number, ((tuple(range(size)),),), 0, device, (everyone,), everyone, everyone, watch)
    words = world.agree("joins", {"their meshes": f"{columns}"}, word=(os.uname().nodename, str(device), kind != "cpu"))
    _check_devices(words, device)
    column = next(index for index, layout in enumerate(columns) if any(number in members for members in layout))
    layout = columns[column]
    names = [words[number][0] for number in layout[0]]
    order = list(dict.fromkeys(names))
    replica = next(index for index, members in enumerate(layout) if number in members)
    rank = layout[replica].index(number)
    world = replace(world, replica=replica, rank=rank, columns=columns, column=column)
    return replace(world, hosts=tuple(order.index(name) for name in names), **_groups(world, mesh))


def _groups(world: World, mesh: Any) -> dict[str, Any]:
    """Return the groups of a rank: the mesh's own ones where it has them."""
    pipelines = [members for layout in world.columns for members in layout]
    replicas = [ranks for layout in world.columns for ranks in zip(*layout, strict=True)]
    sharing = list(zip(*([rank for members in layout for rank in members] for layout in world.columns), strict=True))
    kind, label = world.device.type, f"world {len(_JOINED)}"

    def group(purpose: str, rows: Sequence[Sequence[int]], kind: str) -> Any:
        members = next(row for row in rows if world.number in row)
        default = dist.group.WORLD if kind != "cpu" and len(rows) == 1 else None  # its messages are the user's own
        there = default or mesh_group(mesh, members, kind)
        return new_group(f"{label} {purpose}", rows, kind) if there is None else there

    control, axes = group("control", pipelines, "cpu"), world.axes
    several, shared = world.replicas > 1, world.tensor_ranks > 1
    if world.size * world.pipelines > _FEW:  # in groups of their own, since sums are under way in the others
        axes = (
            control,
            *((new_group(f"{label} words of replicas", replicas, "cpu"),) if several else ()),
            *((new_group(f"{label} words of columns", sharing, "cpu"),) if shared else ()),
        )
    return {
        "label": label,
        "axes": axes,
        "control": control,
        "payload": control if kind == "cpu" else group("payload", pipelines, kind),
        "across": group("replicas", replicas, kind) if several else None,
        "tensor": group("tensors", sharing, kind) if shared else None,
        "accelerated": kind != "cpu",
    }


def _check_devices(places: list[Any], device: torch.device) -> None:
    """Raise DeviceError on every rank where two have one device, or torch.distributed cannot send what lies there."""
    first: dict[Any, int] = {}
    for other, word in enumerate(places):
        if word[2] and first.setdefault(word, other) != other:
            raise DeviceError(
                f"ranks {first[word]} and {other} have one device, {word[1]} of {word[0]}; start as many "
                "processes per host as it has devices"
            )
    if device.type != "cpu" and not carries(dist.group.WORLD, device.type):
        raise DeviceError(
            f"this process has {device}, and torch.distributed was initialised with "
            f"{dist.get_backend_config(dist.group.WORLD)}, which carries no {device.type} tensors; initialise it with "
            "'cpu:gloo,cuda:nccl', or leave that to autosplit"
        )
    if len({word[2] for word in places}) > 1:
        raise DeviceError("some ranks have a CUDA device and others have none; give every rank a device of one kind")


def _device(kind: str, rank: int) -> torch.device:
    """Return the device of this process; one of CUDA becomes its current device."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % count)) % count)
    torch.cuda.set_device(device)
    return device
