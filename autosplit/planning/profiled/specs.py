"""What is known of the devices that a plan is for: the data sheets of those on paper, and of those that are there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import get_args

import torch

from autosplit.options import UNKNOWN_GPU, Options
from autosplit.profile.calibrate import default_path
from cost_models import registry
from cost_models.calibration import Calibrated
from cost_models.specs import DeviceSpec, LinkSpec
from cost_models.work import DType


def device_specs(options: Options) -> tuple[DeviceSpec, ...]:
    """Return what is known of each device: on paper its own figures, else the data sheet of what its driver names."""
    if options.machine is not None:
        return tuple(options.machine.devices)
    return tuple(spec_of(driver_name(device)) for device in options.devices)


def taken_bytes(options: Options) -> tuple[int, ...]:
    """Return what others hold of each GPU that is there: a display, other programs, the driver; none of ranks' GPUs."""

    def taken(device: torch.device) -> int:
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device))

    devices = () if options.processes else options.devices
    return tuple(taken(device) if device.type == "cuda" else 0 for device in devices)


def driver_name(device: torch.device) -> str:
    """Return what a device's driver calls it; the CPU has none, and is ""."""
    return "" if device.type == "cpu" else torch.cuda.get_device_name(device)


def notes_on_unknown(options: Options) -> Iterator[str]:
    """Yield, for each kind of GPU that is there and that no data sheet names, what it is taken for."""
    places: dict[str, list[str]] = {}
    if options.machine is None:
        for device in dict.fromkeys(options.devices):
            name = driver_name(device)
            if name and registry.identify(name) is None:
                places.setdefault(name, []).append(str(device))
    for name, gpus in places.items():
        yield (
            f"{name} ({', '.join(gpus)}) is an unknown GPU: where nothing is measured its times, and in any case its "
            f"links, are taken to be those of {UNKNOWN_GPU}; a device file with its own figures, given to plan() or to "
            "autosplit plan --gpus, tells better"
        )


@lru_cache
def spec_of(driver_name: str) -> DeviceSpec:
    """Return the data sheet of a device that is there, by the name that its driver gives it; the CPU has none.

    What the model computes there can be computed: arithmetic without a rate is taken to be converted, at the fp32 rate.
    """
    known = registry.identify(driver_name) if driver_name else _cpu_lane()
    known = known or registry.device(UNKNOWN_GPU)
    rates = {dtype: known.peak("fp32") for dtype in get_args(DType) if dtype not in known.dtypes}
    return known.model_copy(update={"emulated_flops_per_s": {**known.emulated_flops_per_s, **rates}})


def _cpu_lane() -> DeviceSpec:
    """Return this machine's CPU lane as it was calibrated, else the one of the project."""
    path = default_path()
    return Calibrated.load(path).fallback.device if path.is_file() else registry.device("cpu-lane")


def kernel_issue_s(options: Options, lane: int) -> float:
    """Return how long a host thread takes to issue one kernel to a device; 0 where that is not known, as for lanes."""
    device = options.devices[lane]
    if options.machine is not None:
        return options.machine.devices[lane].issue_s
    known = registry.identify(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.issue_s if known is not None else 0.0


def issue_threads(options: Options) -> int:
    """Return how many host threads issue kernels: one per process; of one process, on paper those of every host."""
    if options.processes:
        return len(options.devices)
    if options.machine is None:
        return 1
    return len(options.machine.host_devices) * options.machine.host.issue_threads


def link_seconds(options: Options, count: int) -> float:
    """Return how long ``count`` bytes take between two neighbours, the slowest pair of them.

    Lanes of one device in one process pass them by reference.
    """
    if len(set(options.places)) == 1:
        return 0.0
    if options.links:
        return max(link.transfer_s(count) for link in options.links)
    neighbours = {pair for pair in pairwise(options.devices) if pair[0] != pair[1]}
    pairs = {(driver_name(first), driver_name(second)) for first, second in neighbours}
    return max(_link(*pair).transfer_s(count) for pair in pairs)


def link_factors(options: Options, count: int) -> tuple[float, ...] | None:
    """Return the factor between a transfer's time on each link of neighbours and that of `link_seconds`.

    None if all links are equal, or all devices are one. Latencies count as in a transfer of ``count`` bytes.
    """
    times_s = [link.transfer_s(count) for link in options.links]
    if len(set(times_s)) < 2 or len(set(options.places)) == 1:
        return None
    return tuple(time_s / max(times_s) for time_s in times_s)


@lru_cache
def _link(first: str, second: str) -> LinkSpec:
    """Return the link between two devices by the names that their drivers give them; the CPU has none."""
    return registry.link(spec_of(first), spec_of(second))
