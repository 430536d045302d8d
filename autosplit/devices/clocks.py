"""How long something takes on a device and how many bytes the device then holds: the one place that asks its kind.

Private torch API: ``torch.cuda._sleep``, the one kernel that takes a time and nothing else; torch's own tests of
streams use it. It is there in torch 2.11 to 2.15; not run on a GPU.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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


_LEAST_LEAD_S, _MOST_LEAD_S = 5e-5, 0.05
"""How long a device is kept busy before what is timed on it: as long as the host needs to issue that, and some more."""
_LEAD, _FADING = 1.5, 0.8
"""How much longer it waits than the longest issue of late, which fades: forwards and backwards take turns."""
_FASTEST_HZ = 2.6e9
"""No GPU's multiprocessors run faster, so a count of cycles is never too short."""


@dataclass(frozen=True)
class Timed:
    """What something returned, the seconds that the device spent on it, and the most bytes that it held meanwhile.

    ``peak_bytes`` counts from nothing, as `Clock.held_bytes` does; None where the device does not count. ``issue_s``
    are the seconds that the host took to issue it; 0 where host and device are one.
    """

    result: Any
    seconds: float
    peak_bytes: int | None = None
    issue_s: float = 0.0


class Clock:
    """The clock of one device, and its count of bytes; as it is here, the CPU's.

    Time passes in the calling thread: its own CPU seconds where it computes alone, else the seconds of the wall. CPU
    seconds leave out what other programs take of the core; a system that counts them in coarse steps has the wall's
    only. torch keeps no count of a CPU's bytes.
    """

    warms = False
    """Whether a kernel's first run takes longer than others: it is loaded, and libraries choose among theirs."""

    def __init__(self, *, threads: int) -> None:
        fine = time.get_clock_info("thread_time").resolution <= _FINE_S
        self._now_s = time.thread_time if threads == 1 and fine else time.perf_counter

    def timed(self, run: Callable[[], Any]) -> Timed:
        """Run something and time it."""
        start_s = self._now_s()
        result = run()
        return Timed(result, self._now_s() - start_s)

    def held_bytes(self) -> int | None:
        """Return the bytes that tensors hold on the device now; None where the device does not count."""
        return None

    def release(self) -> None:
        """Give back memory that is cached for tensors to come."""


class CudaClock(Clock):
    """Events in the device's current stream; bytes as torch's caching allocator counts them.

    ```
        host     issue the wait ─ event ─ a b c d ─ event                    synchronise
        device   [ waits: as long as the host issued before ][a][b][c][d]
                                                              └─ seconds ┘
    ```

    The time between two events is the device's only where the host is ahead of it: else it is that of the host, which
    issues a small kernel in more time than the kernel takes. So the device waits first. What makes the host wait for
    the device in its middle is timed with that.

    The allocator's peaks (``torch.cuda.max_memory_allocated``) start anew with everything that is timed.
    """

    warms = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issue_s = 0.0

    def timed(self, run: Callable[[], Any]) -> Timed:
        """Run something, time it, and wait for it."""
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.reset_peak_memory_stats(self._device)
            occupy(min(max(_LEAST_LEAD_S, _LEAD * self._issue_s), _MOST_LEAD_S))
            start.record()
            began_s = time.perf_counter()
            result = run()
            issue_s = time.perf_counter() - began_s
            end.record()
            end.synchronize()
        peak = torch.cuda.max_memory_allocated(self._device)
        self._issue_s = max(issue_s, _FADING * self._issue_s)
        return Timed(result, start.elapsed_time(end) / 1e3, peak, issue_s)

    def held_bytes(self) -> int:
        """Return the bytes that tensors hold on the device now."""
        return torch.cuda.memory_allocated(self._device)

    def release(self) -> None:
        """Give cached blocks back to the device."""
        torch.cuda.empty_cache()


def occupy(seconds: float) -> None:
    """Keep the current CUDA stream busy for at least so long, with a kernel that does nothing."""
    torch.cuda._sleep(int(seconds * _FASTEST_HZ))


def clock_of(device: torch.device, *, threads: int) -> Clock:
    """Return the clock of a device; ``threads`` is the number of intra-op threads of a CPU."""
    return CudaClock(device) if device.type == "cuda" else Clock(threads=threads)


def device_text(device: torch.device) -> str:
    """Return which piece of hardware a device is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


@cache
def _processor() -> str:
    """Return the CPU's name: Linux alone has it in a file, elsewhere Python's standard library knows."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
