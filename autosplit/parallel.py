"""How many ranks share a model in each way: data, context, tensor, pipeline and expert parallel.

pp > dp > cp > tp      from the outermost to the innermost, whose ranks are neighbours
     └──────┘          ranks of ep are neighbours among those of dp and cp, as torchtitan and Megatron-LM have them
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError
from autosplit.runtimes import RUNTIMES, Runtime, RuntimeName
from autosplit.schedule.action import Action
from autosplit.schedule.entry import Entry, Reduce, Reshard, Unshard
from autosplit.schedule.order import with_gathers, with_marks, with_reductions

if TYPE_CHECKING:
    from autosplit.profile.types import StateProfile
    from cost_models.collectives import Group
    from cost_models.machines import MachineSpec

DIMENSIONS = ("pp", "dp", "cp", "tp")
"""The dimensions of a mesh from the outermost to the innermost."""
ZERO = (0, 1, 2, 3)
"""What data-parallel ranks shard (Rajbhandari et al. 2020): nothing, the optimizer's state, gradients too, all."""
BUCKET_BYTES = 25 << 20
"""Gradients of replicas are added up in buckets: parameters in model order, until they fill so much."""


def buckets_of(sizes: Iterable[int], *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[int]:
    """Yield the bytes of the buckets of gradients of these sizes, one after the other."""
    filled = 0
    for size in sizes:
        filled += size
        if filled >= bucket_bytes:
            yield filled
            filled = 0
    if filled:
        yield filled


def largest_bucket(sizes: Iterable[int]) -> int:
    """Return the bytes of the largest bucket of gradients of these sizes."""
    return max(buckets_of(sizes), default=0)


@dataclass(frozen=True)
class Parallel:
    """The degrees of a mesh, what its data-parallel ranks shard, whether tensor-parallel ones share positions, and by
    which runtime."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sequence: bool = False
    runtime: RuntimeName = "autosplit"
    by_units: bool = False
    """Whether autosplit's ZeRO-3 gathers block by block in every action (``fsdp_reshard="always"``)."""
    sum_bytes: int = 0
    """The least bytes of an element that gradients are added up in (``reduce_dtype=``)."""
    shard_bytes: int = 0
    """The least bytes of an element of what ZeRO-3 shards, and of gradients of it (``mp_policy=``)."""
    cp: int = 1
    """How many ranks share the tokens of each row (context parallel)."""
    ep: int = 1
    """How many ranks of dp and cp share the experts (expert parallel)."""

    @property
    def rules(self) -> Runtime:
        """What is known of the runtime."""
        return RUNTIMES[self.runtime]

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that the runtime has with these degrees."""
        others = {name for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1}
        return tuple(stage for stage, dimensions in self.rules.zero.items() if others.issubset(dimensions))

    @property
    def whole(self) -> bool:
        """Whether a rank holds parameters and gradients whole through a step, and a shard of them between steps."""
        least = self.rules.whole_from
        return self.zero == 3 and self.replicas > 1 and least is not None and self.pp >= least and not self.by_units

    @property
    def scatters(self) -> bool:
        """Whether gradients are scattered in every backward, and a rank holds shards of them."""
        return self.zero >= 2 and self.replicas > 1 and not self.whole

    def entries(self, entries: Sequence[Entry], marks: Sequence[tuple[int, str]] = ()) -> tuple[Entry, ...]:
        """Return a device's list with what its replicas gather and sum up.

        ``marks``: where its schedule's file has that (`Schedule.marks`); gathers stand where the runtime has them.
        """
        if self.by_units:
            return with_gathers(entries, each_action=True)
        if self.replicas == 1:
            return tuple(entries)
        entries = [e for e in with_marks(entries, marks) if not isinstance(e, (Unshard, Reshard))]
        stages = sorted({entry.stage for entry in entries if isinstance(entry, Action)})
        gathers = map(Unshard, stages if self.whole or self.zero in (1, 2) else ())
        listed = entries if self.scatters else with_reductions(entries)
        if self.whole and not self.rules.beside:
            listed = sorted(listed, key=lambda entry: isinstance(entry, Reduce))  # sums behind all else
        return (*gathers, *listed, *map(Reshard, stages if self.whole else ()))

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.replicas * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """How many ranks have the same part of the model, but for experts: gradients are summed over them."""
        return self.dp * self.cp

    def sum_of(self, state: StateProfile) -> int:
        """Return the bytes of a parameter's gradient as it is added up."""
        return max(state.bytes, max(self.sum_bytes, self.rules.sum_bytes) * state.elements)

    def kept_of(self, state: StateProfile) -> int:
        """Return the bytes of a parameter's gradient, or of all its shards, as a step keeps it.

        Shards of sums in fp32 count as the parameter's own dtype where the runtime alone says fp32: it has no shard of
        that beside its fp32 weights, which are the optimizer's here.
        """
        if not self.scatters:
            return self.sum_of(state)
        return max(state.bytes, max(self.sum_bytes, self.shard_bytes) * state.elements)

    def part_of(self, byte_count: int, state: StateProfile, *, zero: int) -> int:
        """Return one rank's share of a parameter's bytes that are sharded from ZeRO stage ``zero`` on."""
        sharded = self.scatters if zero == 2 else self.zero >= zero
        return -(-byte_count * state.experts // self.replicas) if sharded else byte_count

    def __str__(self) -> str:
        return ",".join(f"{name}={degree}" for name, degree in named_degrees(self))


def named_degrees(mesh: Any) -> list[tuple[str, int]]:
    """Return the degrees of a mesh by name; those of cp and ep where there are several ranks."""
    every = [(name, getattr(mesh, name)) for name in ("dp", "tp", "pp", "cp", "ep")]
    return every[:3] + [(name, degree) for name, degree in every[3:] if degree > 1]


@dataclass(frozen=True)
class Placed:
    """A mesh on the devices of a machine.

    Attributes:
        parallel: the degrees.
        pipeline: the devices of one pipeline, as a machine of its own.
        groups: the first rank's, by dimension; "dp" takes in cp's ranks, "edp" those of them with the same experts.
    """

    parallel: Parallel
    pipeline: MachineSpec
    groups: Mapping[str, Group]

    def summing(self, experts: int) -> Group:
        """Return the ranks that sum a parameter's gradient, and share it out under ZeRO (`StateProfile.experts`)."""
        return self.groups["dp" if experts == 1 else "edp"]


def place(machine: MachineSpec, parallel: Parallel) -> Placed:
    """Return where the ranks of a mesh are, by the order of `DIMENSIONS`."""
    from cost_models.collectives import group_of
    from cost_models.machines import MachineSpec

    tp, ep, replicas = parallel.tp, parallel.ep, parallel.replicas
    stages = range(0, parallel.ranks, replicas * tp)
    islands = [machine.island_of(device) for device in stages]
    hosts = [len(list(run)) for _, run in groupby(islands)]
    far = next((at for at, island in zip(stages, islands, strict=True) if island != islands[0]), None)
    pipeline = MachineSpec(
        name=machine.name,
        devices=tuple(machine.devices[at] for at in stages),
        host_devices=tuple(hosts),
        host=machine.host,
        network=None if far is None else machine.link(0, far),
    )
    along = {"dp": (tp, replicas), "tp": (1, tp), "cp": (tp, parallel.cp), "ep": (tp, ep)}
    along |= {"edp": (tp * ep, replicas // ep)}
    groups = {name: group_of(machine, range(0, step * count, step)) for name, (step, count) in along.items()}
    return Placed(parallel, pipeline, groups)


def check_mesh(mesh: Any, *, devices: int) -> Parallel | str | None:
    """Return the degrees of a mapping or a text such as "dp=8,tp=2,pp=4"; "auto" and None as they are.

    A dimension that is left out is 1; ep divides ranks of dp and cp, and is none of the product. Raises InputError for
    an unknown dimension, a degree that is no positive number, or degrees whose product is not the number of devices.
    """
    if mesh is None or mesh == "auto":
        return mesh
    degrees = _parsed(mesh) if isinstance(mesh, str) else mesh
    if not isinstance(degrees, Mapping) or not degrees:
        raise InputError(f"mesh={mesh!r}: give 'auto', or degrees such as {{'dp': 8, 'tp': 2, 'pp': 4}}")
    for name, degree in degrees.items():
        if name not in (*DIMENSIONS, "ep"):
            raise InputError(f"mesh has a dimension {name!r}; valid: {', '.join(DIMENSIONS)}, ep")
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise InputError(f"mesh has {name}={degree!r}; give an int of at least 1")
    dividing = {name: degree for name, degree in degrees.items() if name != "ep"}
    if (size := math.prod(dividing.values())) != devices:
        product = " x ".join(f"{name}={degree}" for name, degree in dividing.items())
        raise InputError(
            f"the mesh {product} has {size} ranks, devices names {devices}; give degrees that multiply to that"
        )
    parallel = Parallel(**degrees)
    if parallel.replicas % parallel.ep:
        raise InputError(
            f"ep={parallel.ep} ranks share experts among the dp x cp = {parallel.replicas} that have the same part of "
            "the model, as in torchtitan and Megatron-LM; give a degree that divides those"
        )
    return parallel


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
