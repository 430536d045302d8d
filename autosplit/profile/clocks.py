"""How long something takes on a device and how many bytes the device then holds: the one place that asks its kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What torch says in a plain RuntimeError: c10/core/impl/alloc_cpu.cpp on Linux and Windows, and CUDA's libraries."""

_FINE_S = 1e-6
"""The coarsest count of CPU seconds that tells the time of one operation."""


@dataclass(frozen=True)
class Timed:
    """What something returned, the seconds that the device spent on it, and the most bytes that it held meanwhile.

    ``peak_bytes`` counts from nothing, as `Clock.held_bytes` does; None where the device does not count.
    """

    result: Any
    seconds: float
    peak_bytes: int | None = None


class Clock(Protocol):
    """The clock of one device, and its count of bytes."""

    def timed(self, run: Callable[[], Any]) -> Timed:
        """Run something and time it."""
        ...

    def held_bytes(self) -> int | None:
        """Return the bytes that tensors hold on the device now; None where the device does not count."""
        ...

    def release(self) -> None:
        """Give back memory that is cached for tensors to come."""
        ...


class CpuClock:
    """Time passes in the calling thread: its own CPU seconds where it computes alone, else the seconds of the wall.

    CPU seconds leave out what other programs take of the core; a system that counts them in coarse steps has the wall's
    only. torch keeps no count of a CPU's bytes.
    """

    def __init__(self, *, threads: int) -> None:
        fine = time.get_clock_info("thread_time").resolution <= _FINE_S
        self._now_s = time.thread_time if threads == 1 and fine else time.perf_counter

    def timed(self, run: Callable[[], Any]) -> Timed:
        """Run something and time it."""
        start_s = self._now_s()
        result = run()
        return Timed(result, self._now_s() - start_s)

    def held_bytes(self) -> None:
        """Return None."""

    def release(self) -> None:
        """Do nothing: the allocator keeps nothing back."""


class CudaClock:
    """Events in the device's current stream; bytes as torch's caching allocator counts them.

    The allocator's peaks (``torch.cuda.max_memory_allocated``) start anew with everything that is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def timed(self, run: Callable[[], Any]) -> Timed:
        """Run something, time it, and wait for it."""
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.reset_peak_memory_stats(self._device)
            start.record()
            result = run()
            end.record()
            end.synchronize()
        return Timed(result, start.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated(self._device))

    def held_bytes(self) -> int:
        """Return the bytes that tensors hold on the device now."""
        return torch.cuda.memory_allocated(self._device)

    def release(self) -> None:
        """Give cached blocks back to the device."""
        torch.cuda.empty_cache()


def clock_of(device: torch.device, *, threads: int) -> Clock:
    """Return the clock of a device; ``threads`` is the number of intra-op threads of a CPU."""
    return CudaClock(device) if device.type == "cuda" else CpuClock(threads=threads)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
