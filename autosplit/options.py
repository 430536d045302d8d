"""What the caller asks for, checked once: samples, devices and the choices of `autosplit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch

from autosplit.checks import COMPILE_ARGUMENTS, COMPILE_MODES, LANES, MASTERS, RNG, choose
from autosplit.errors import DeviceError, InputError
from autosplit.parallel import Parallel, Placed
from autosplit.schedule.memory.updates import HOSTED, Updated, state_sizes
from cost_models import registry
from cost_models.communicators import collective_bytes, communicator_bytes
from cost_models.machines import HostSpec, MachineSpec
from cost_models.specs import DeviceSpec, LinkSpec, Source

if TYPE_CHECKING:
    from autosplit.profile.types import StateProfile

_MASTER_BYTES = 4
UNKNOWN_GPU = "A100-PCIe-80GB"
"""What a GPU that no data sheet names is taken for: its link is PCIe 4.0."""
_MEASURED = Source(
    status="measured",
    text="two processes on two cores, gloo of torch 2.13, receives posted ahead: 30 us for 64 KiB, 0.8 ms for 4 MiB",
)
_GLOO = LinkSpec(
    name="gloo",
    bandwidth_bytes_per_s=5.4e9,
    latency_s=1.8e-5,
    sources={"bandwidth_bytes_per_s": _MEASURED, "latency_s": _MEASURED},
)
"""What processes on CPU lanes send through, on one host."""


class Sample:
    """Positional and keyword inputs of one call, together: ``Sample(x, mask=m)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        parts = [_describe(a) for a in self.args] + [f"{k}={_describe(v)}" for k, v in self.kwargs.items()]
        return f"Sample({', '.join(parts)})"

    @classmethod
    def of(cls, value: Any) -> Sample:
        """Return a Sample from a tensor, a tuple of positional inputs, a dict of keyword inputs, or a Sample."""
        if isinstance(value, Sample):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        if isinstance(value, tuple):
            return cls(*value)
        if isinstance(value, list):
            raise InputError(
                "sample is a list; give a tuple of positional inputs, a dict of keyword inputs, or a Sample"
            )
        return cls(value)


@dataclass(frozen=True)
class Options:
    """The checked arguments of `autosplit` that outlive the call."""

    devices: tuple[torch.device, ...]
    chunks: int
    schedule: str = "1f1b"
    virtual_stages: int = 1
    actions: tuple[tuple[str, ...], ...] = ()
    """A schedule of the caller's own, device by device, in text form; ``schedule`` is then what errors call it."""
    replicas: tuple[int, ...] | None = ()
    """The number of consecutive devices of each stage; empty: one each. None: the fastest choice."""
    memory_limit: int | tuple[int | None, ...] | None = None
    """What tensors may take of every device, or of each, in bytes; None: all that it has."""
    taken_bytes: tuple[int, ...] = ()
    """What others hold of each device, such as a display and the driver; empty: nothing."""
    optimizer: str | int = "adamw"
    batch_dims: Any = None
    recompute: tuple[str, ...] | None = ("never",)
    """What every stage does, or one entry per stage; None: recompute only what the memory limit asks for."""
    lanes: str = "inline"
    lane_timeout_s: float | None = 1800.0
    rng: str = "counter"
    """Whose random numbers: "plain" (the model's own bits), "counter" (seeded by step, operation and microbatch)."""
    batch_norm: str | None = None
    """What batch norms in training take their statistics over: "micro", "full"; None: "micro", with a warning."""
    measure: bool = True
    cut: Mapping[str, int] | None = None
    """The stages of modules by their paths, for all that runs inside them; None: the plan finds the cut."""
    cut_between: str = "operations"
    """Where the plan's cuts fall: between "modules" where that costs little, or between any "operations"."""
    microbatches: str = "tensor_split"
    """Whose sizes microbatches have: those of ``torch.tensor_split`` or of ``torch.chunk``."""
    norm_counts: str = "step"
    """What running statistics of norms count as one update: a "step", or each "microbatch" of it."""
    compile: Mapping[str, Any] | None = None
    """The arguments of ``torch.compile``, by which stages run; None: as they are."""
    machine: MachineSpec | None = None
    """The machine on paper that is planned for, one device per lane; ``devices`` only stand for them then."""
    reserve: int | float = 0
    """What every device keeps free: bytes, or as a float a share of what it has; a peak in it is borderline."""
    allocator: str = "default"
    """How torch's caching allocator is set: "default", or "expandable" segments, which leave fewer fragments."""
    precision: str | None = None
    """What training runs in, on paper; None: as the model is. The model that is planned has that dtype already."""
    processes: bool = False
    """Whether each device has a process of its own: a host thread for each, and values are sent and not shared."""
    hosts: tuple[int, ...] = ()
    """The index of each process's host, ascending; empty: all are on one host, or on those of the ``machine``."""
    offload: tuple[str, ...] = ()
    """What lies on the host, on paper: the "optimizer", and "activations" that blocks save."""
    placed: Placed | None = None
    """The mesh on paper that is planned for; ``devices`` and ``machine`` are those of one pipeline in it."""
    loss: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    """The loss of a microbatch on paper, from the first output and the number of rows; None: the mean of that."""

    def optimizer_bytes(self, state: StateProfile) -> int:
        """Return the bytes of optimizer state of one parameter, an fp32 master weight among them."""
        updated = self.updated(state)
        master = updated.bytes if self.precision in MASTERS and self.optimizer != HOSTED else 0
        if isinstance(self.optimizer, int):
            return master + self.parallel.part_of(self.optimizer * state.elements, state, zero=1)
        return master + sum(state_sizes(self.optimizer, updated))

    def updated(self, state: StateProfile) -> Updated:
        """Return what the optimizer updates of one parameter: its fp32 master weight, or else itself.

        Where data-parallel ranks shard the optimizer's state it is this rank's part.
        """
        elements = state.elements
        size = max(state.bytes // elements, self.parallel.shard_bytes) if elements else 1
        size = _MASTER_BYTES if self.precision in MASTERS else size
        return Updated(self.parallel.part_of(elements, state, zero=1), size, state.shape)

    def step_bytes(self, state: StateProfile) -> int:
        """Return what the optimizer's step allocates for one parameter: the list of roots of torch's foreach Adam.

        Master weights are stepped in batches, which take little.
        """
        if self.optimizer not in ("adam", "adamw") or self.kernels == "cpu" or self.precision in MASTERS:
            return 0
        return self.updated(state).bytes

    @property
    def parallel(self) -> Parallel:
        """The degrees of the mesh."""
        return Parallel(pp=len(self.devices)) if self.placed is None else self.placed.parallel

    def __post_init__(self) -> None:
        limits, count = self.memory_limit, len(self.devices)
        if isinstance(limits, tuple) and len(limits) != count:
            raise InputError(
                f"memory_limit has {len(limits)} entries, and there are {count} devices; give one for each"
            )

    def taking(self, lanes: Sequence[int]) -> Options:
        """Return the options with some of the devices, in the order of these indices."""
        if list(lanes) == list(range(len(self.devices))):
            return self
        listed = ("devices", "memory_limit", "taken_bytes")
        lists = {name: each for name in listed if isinstance(each := getattr(self, name), tuple) and each}
        taken: dict[str, Any] = {name: tuple(each[lane] for lane in lanes) for name, each in lists.items()}
        return replace(self, **taken, machine=self.machine and self.machine.taking(lanes))

    def as_planned(self, names: Sequence[str]) -> Options:
        """Return the options with the devices that a plan names, in its order; as they are where they are others."""
        lanes: list[int] = []
        kinds = ["" if self.machine is not None else _spec(device).name for device in self.devices]
        for name in names:
            left = (lane for lane in range(len(self.devices)) if lane not in lanes)
            lanes += [lane for lane in left if name in (self.device_name(lane), kinds[lane])][:1]
        return self.taking(lanes) if len(lanes) == len(names) and not self.processes else self

    def limit_of(self, lane: int) -> int | None:
        """Return the caller's limit of one of the devices."""
        return self.memory_limit[lane] if isinstance(self.memory_limit, tuple) else self.memory_limit

    def capacity_bytes(self, lane: int, *, kept_bytes: int | None = None) -> int | None:
        """Return the bytes that tensors may use of one of the devices; None where that is not known.

        It is the caller's limit, or else the device's memory minus ``kept_bytes``: what NCCL keeps of it, by default
        for connections to neighbours.
        """
        device, limit = self.devices[lane], self.limit_of(lane)
        if limit is not None:
            return limit
        if self.machine is not None:
            limit = self.machine.devices[lane].usable_bytes
        elif device.type == "cuda":
            limit = int(torch.cuda.get_device_properties(device).total_memory) - sum(self.taken_bytes[lane : lane + 1])
        kept = self.neighbours_bytes[lane] if kept_bytes is None else kept_bytes
        return None if limit is None else max(0, limit - kept)

    def reserved_bytes(self, lane: int) -> int:
        """Return the reserve of one of the devices; a share is of the device's memory, and 0 under a memory limit."""
        capacity = self.capacity_bytes(lane)
        if capacity is None or (isinstance(self.reserve, float) and self.limit_of(lane) is not None):
            return 0
        return round(self.reserve * capacity) if isinstance(self.reserve, float) else self.reserve

    def room_bytes(self, lane: int) -> int | None:
        """Return the bytes that certainly fit on one of the devices; None if its capacity is not known."""
        capacity = self.capacity_bytes(lane)
        return None if capacity is None else max(0, capacity - self.reserved_bytes(lane))

    def device_name(self, lane: int) -> str:
        """Return what a plan calls one of the devices."""
        return str(self.devices[lane] if self.machine is None else self.machine.devices[lane].name)

    @property
    def places(self) -> tuple[Hashable, ...]:
        """Where each lane keeps its values: lanes of equal places pass them by reference. Processes share none."""
        return tuple(range(len(self.devices))) if self.processes else self.devices

    @cached_property
    def world(self) -> MachineSpec:
        """The devices of processes and the links between them: the machine on paper, else by the drivers' names."""
        if self.machine is not None:
            return self.machine
        each = tuple(Counter(self.hosts[: len(self.devices)]).values()) or (len(self.devices),)
        threads = Source(status="prior", text="one process for each device")
        return MachineSpec(
            name="processes",
            devices=tuple(map(_spec, self.devices)),
            host_devices=each,
            host=HostSpec(issue_threads=max(each), sources={"issue_threads": threads}),
            network=registry.network() if len(each) > 1 else None,
        )

    @cached_property
    def links(self) -> tuple[LinkSpec, ...]:
        """The links between neighbours, on paper or between processes; empty where one process has the devices."""
        if self.machine is None and not self.processes:
            return ()
        neighbours = pairwise(range(len(self.devices)))
        if self.processes and self.kernels == "cpu":
            return tuple(_GLOO for _ in neighbours)
        return tuple(self.world.link(*pair) for pair in neighbours)

    def communicator_bytes(self, pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Return what NCCL keeps of each device for the directed pairs of lanes that send; 0 in one process."""
        if not self.processes or self.kernels == "cpu":
            return (0,) * len(self.devices)
        groups = {} if self.placed is None else self.placed.groups
        kept = sum(collective_bytes(groups[name]) for name in ("dp", "tp", "cp", "ep") if groups)
        return tuple(size + kept for size in communicator_bytes(self.world, pairs))

    @cached_property
    def neighbours_bytes(self) -> tuple[int, ...]:
        """What NCCL keeps of each device where neighbours send values, and gradients back."""
        there = list(pairwise(range(len(self.devices))))
        return self.communicator_bytes([*there, *((b, a) for a, b in there if self.schedule != "forward")])

    @property
    def leading(self) -> int:
        """Which device a model is profiled for: the first CUDA device by its index, if there is one."""
        cuda = (lane for lane, device in enumerate(self.devices) if device.type == "cuda")
        return min(cuda, key=lambda lane: self.devices[lane].index or 0, default=0)

    @property
    def kernels(self) -> Literal["cpu", "cuda"]:
        """Whose kernels' operations, results and scratch are counted where nothing runs."""
        return "cuda" if self.devices[self.leading].type == "cuda" else "cpu"


def _spec(device: torch.device) -> DeviceSpec:
    """Return the data sheet of a device that is there."""
    known = registry.identify(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known or registry.device(UNKNOWN_GPU if device.type == "cuda" else "cpu-lane")


def check_seconds(name: str, seconds: Any) -> float | None:
    """Return a positive number of seconds, or None."""
    if seconds is None or (isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0):
        return seconds
    raise InputError(f"{name}={seconds!r}: give a positive number of seconds, or None for no limit")


def resolve_lanes(lanes: str, devices: Sequence[torch.device]) -> str:
    """Return "inline" (one thread issues) or "threads" (one thread per lane) for "auto": threads on several CPU lanes.

    CUDA launches are asynchronous, and one thread issues them; threads on CUDA devices raise an InputError.
    """
    choose("lanes", lanes, LANES)
    cuda = [str(device) for device in devices if device.type != "cpu"]
    if lanes == "threads" and cuda:
        raise InputError(f"lanes='threads' is for CPU lanes, devices has {', '.join(cuda)}; use lanes='inline'")
    if lanes == "auto":
        return "inline" if cuda or len(devices) == 1 else "threads"
    return lanes


def resolve_rng(rng: str, devices: Sequence[torch.device]) -> str:
    """Return "plain" or "counter" for "auto": plain on CPU lanes; plain on CUDA devices raises an InputError."""
    choose("rng", rng, RNG)
    cuda = [str(device) for device in devices if device.type != "cpu"]
    if rng == "plain" and cuda:
        raise InputError(
            f"rng='plain' is for CPU lanes, devices has {', '.join(cuda)}: a CUDA kernel's numbers depend on how it is "
            "launched; use rng='counter'"
        )
    if rng == "auto":
        return "counter" if cuda else "plain"
    return rng


def resolve_compile(compile: Any) -> Mapping[str, Any] | None:
    """Return the arguments of ``torch.compile``: none for True, a mode's, or those of a dict; None for False."""
    if isinstance(compile, Mapping):
        for name in compile:
            choose("compile", name, COMPILE_ARGUMENTS)
        if compile.get("mode") is not None:
            choose("compile mode", compile["mode"], COMPILE_MODES)
        return dict(compile)
    choose("compile", compile, (False, True, *COMPILE_MODES))
    if isinstance(compile, str):
        return {"mode": compile}
    return {} if compile else None


def resolve_devices(devices: Any) -> tuple[torch.device, ...]:
    """Return one device per stage from a number or a list of torch devices; raise DeviceError for what is not there.

    A number means that many CUDA devices on a machine that has any, else that many CPU lanes.
    """
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _count(devices)
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    if not isinstance(devices, Sequence) or not devices:
        raise DeviceError(
            f"devices={devices!r}: give a number, or a list such as ['cpu', 'cpu'] or ['cuda:0', 'cuda:1']"
        )
    return tuple(_device(entry) for entry in devices)


def _count(count: int) -> tuple[torch.device, ...]:
    if count < 1:
        raise DeviceError(f"devices={count}: give at least one device")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not available:
        return (torch.device("cpu"),) * count
    if count > available:
        spread = [f"cuda:{i % available}" for i in range(count)]
        raise DeviceError(
            f"devices={count}, but this machine has {available} CUDA device(s); pass a list in which a device repeats, "
            f"for example devices={spread}, or CPU lanes: devices={['cpu'] * count}"
        )
    return tuple(torch.device("cuda", i) for i in range(count))


def _device(entry: Any) -> torch.device:
    try:
        device = torch.device(entry)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"{entry!r} is no torch device; valid here: {', '.join(_valid())} (a device may repeat in the list)"
        ) from error
    if device.type == "cuda":
        available = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= available:
            raise DeviceError(
                f"{entry!r} does not exist: this machine has {available} CUDA device(s); valid here: "
                f"{', '.join(_valid())}. Pass a list in which a device repeats, for example devices={['cpu'] * 4}"
            )
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise DeviceError(f"{entry!r} is not supported; valid here: {', '.join(_valid())}")
    return torch.device("cpu")


def _valid() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["'cpu'", *(f"'cuda:{i}'" for i in range(count))]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
