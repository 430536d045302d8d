"""Clocks: events and the allocator's count on CUDA, and which errors mean that memory ran out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

from autosplit.devices import clock_of, is_out_of_memory


class FakeCuda:
    """What a `CudaClock` asks of torch, noted in order; the host issues everything in ``issue_s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.issue_s = 0.004
        self.now_s = 0.0
        order = self.order

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.name = "end" if order[-1:] == ["run"] else "start"
                order.append("made")

            def record(self, stream: None) -> None:
                order.append(f"record {self.name}")

            def synchronize(self) -> None:
                order.append(f"wait {self.name}")

            def elapsed_time(self, end: Event) -> float:
                return 250.0

        @contextlib.contextmanager
        def on(device: torch.device) -> Iterator[None]:
            order.append(f"enter {device}")
            yield
            order.append("leave")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", on)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: order.append(f"reset {device}"))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 70)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"sleep {cycles}"))
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def run(self) -> str:
        self.order.append("run")
        self.now_s += self.issue_s
        return "done"


def test_on_cuda_events_take_the_time_and_the_allocator_counts(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    clock = clock_of(torch.device("cuda", 1), threads=1)
    found = clock.timed(cuda.run)
    assert (found.result, found.seconds, found.peak_bytes, found.issue_s) == ("done", 0.25, 70, 0.004)
    assert cuda.order == [
        "enter cuda:1",
        "reset cuda:1",
        "sleep 130000",
        "made",
        "record start",
        "run",
        "made",
        "record end",
        "wait end",
        "leave",
    ]


def test_the_device_waits_as_long_as_the_host_issued_of_late(monkeypatch):
    """Else the time between the events is the host's. A short forward does not shorten a backward's wait."""
    cuda = FakeCuda(monkeypatch)
    clock = clock_of(torch.device("cuda", 1), threads=1)
    for seconds in (0.004, 0.02, 0.001, 0.1, 0.0):
        cuda.issue_s = seconds
        clock.timed(cuda.run)
    assert [text for text in cuda.order if text.startswith("sleep")] == [
        "sleep 130000",
        "sleep 15600000",
        "sleep 78000000",
        "sleep 62400000",
        "sleep 130000000",
    ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error, expected):
    assert is_out_of_memory(error) is expected
