"""A lane: where one stage's actions run in order. The one place that asks what kind of device it is."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Lane(Protocol):
    """One stage's device and its order of work."""

    device: torch.device

    def record(self) -> Any:
        """Return an event that is reached when the work issued so far is done; None where work is done when issued."""

    def wait(self, event: Any) -> None:
        """Make later work of this lane wait for an event of another lane."""


class CpuLane:
    """Work on the CPU is done when the call returns: there is nothing to record or to wait for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def record(self) -> None:
        """Return None: everything issued is done."""

    def wait(self, event: Any) -> None:
        """Wait for another lane's event; the CPU waits for a CUDA event itself."""
        if event is not None:
            event.synchronize()


class CudaLane:
    """The current stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self) -> torch.cuda.Event:
        """Record an event on the device's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the device's current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def lane(device: torch.device) -> Lane:
    """Return the lane for a device."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()
