"""How many ranks share a model in each way: data (dp), tensor (tp) and pipeline (pp) parallel."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError

if TYPE_CHECKING:
    from cost_models.collectives import Group
    from cost_models.machines import MachineSpec

DIMENSIONS = ("dp", "tp", "pp")
ZERO = (0, 1, 2, 3)
"""What data-parallel ranks shard (Rajbhandari et al. 2020): nothing, the optimizer's state, gradients too, all."""
BUCKET_BYTES = 25 << 20
"""Gradients of replicas are added up in buckets: parameters in model order, until they fill so much."""


def largest_bucket(sizes: Iterable[int]) -> int:
    """Return the bytes of the largest bucket of gradients of these sizes."""
    largest = filled = 0
    for size in sizes:
        filled += size
        largest = max(largest, filled)
        filled = 0 if filled >= BUCKET_BYTES else filled
    return largest


@dataclass(frozen=True)
class Parallel:
    """The degrees of a mesh, what its data-parallel ranks shard, and whether tensor-parallel ones share positions."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sequence: bool = False

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.dp * self.tp * self.pp

    def part_of(self, byte_count: int, *, zero: int) -> int:
        """Return one rank's share of bytes that are sharded from ZeRO stage ``zero`` on."""
        return -(-byte_count // self.dp) if self.zero >= zero else byte_count

    def __str__(self) -> str:
        named = [f"{name}={getattr(self, name)}" for name in DIMENSIONS]
        return ",".join(named)


@dataclass(frozen=True)
class Placed:
    """A mesh on the devices of a machine.

    Attributes:
        parallel: the degrees.
        order: the dimensions from the outermost, whose neighbours are the furthest apart, to the innermost.
        machine: the name of the whole machine.
        pipeline: the devices of one pipeline, as a machine of its own.
        dp, tp: the groups of the first rank.
    """

    parallel: Parallel
    order: tuple[str, ...]
    machine: str
    pipeline: MachineSpec
    dp: Group
    tp: Group


def place(machine: MachineSpec, parallel: Parallel, *, order: tuple[str, ...] = ("pp", "dp", "tp")) -> Placed:
    """Return where the ranks of a mesh are: neighbours of the last dimension in the order are neighbours."""
    from cost_models.collectives import group_of
    from cost_models.machines import MachineSpec

    strides, stride = {}, 1
    for name in reversed(order):
        strides[name] = stride
        stride *= getattr(parallel, name)
    along = {name: [index * strides[name] for index in range(getattr(parallel, name))] for name in DIMENSIONS}
    islands = [machine.island_of(device) for device in along["pp"]]
    hosts = [len(list(run)) for _, run in groupby(islands)]
    far = next((at for at, island in zip(along["pp"], islands, strict=True) if island != islands[0]), None)
    pipeline = MachineSpec(
        name=machine.name,
        devices=tuple(machine.devices[at] for at in along["pp"]),
        host_devices=tuple(hosts),
        host=machine.host,
        network=None if far is None else machine.link(0, far),
    )
    groups = {name: group_of(machine, along[name]) for name in ("dp", "tp")}
    return Placed(parallel, order, machine.name, pipeline, **groups)


def check_mesh(mesh: Any, *, devices: int) -> Parallel | str | None:
    """Return the degrees of a mapping or a text such as "dp=8,tp=2,pp=4"; "auto" and None as they are.

    A dimension that is left out is 1. Raises InputError for an unknown dimension, a degree that is no positive number,
    or degrees whose product is not the number of devices.
    """
    if mesh is None or mesh == "auto":
        return mesh
    degrees = _parsed(mesh) if isinstance(mesh, str) else mesh
    if not isinstance(degrees, Mapping) or not degrees:
        raise InputError(f"mesh={mesh!r}: give 'auto', or degrees such as {{'dp': 8, 'tp': 2, 'pp': 4}}")
    for name, degree in degrees.items():
        if name not in DIMENSIONS:
            raise InputError(f"mesh has a dimension {name!r}; valid: {', '.join(DIMENSIONS)}")
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise InputError(f"mesh has {name}={degree!r}; give an int of at least 1")
    if (size := math.prod(degrees.values())) != devices:
        product = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise InputError(
            f"the mesh {product} has {size} ranks, devices names {devices}; give degrees that multiply to that"
        )
    return Parallel(**degrees)


def _parsed(text: str) -> Mapping[str, int] | None:
    parts = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", item) for item in text.split(",")]
    return {match[1]: int(match[2]) for match in parts if match} if all(parts) else None


def check_zero(zero: Any) -> int | None:
    """Return the ZeRO stage; None for "auto"."""
    if zero == "auto":
        return None
    if isinstance(zero, bool) or zero not in ZERO:
        raise InputError(f"zero={zero!r} is not available; valid: 'auto', {', '.join(map(str, ZERO))}")
    return int(zero)
