"""The seam to the accelerator: streams, events, copies and lifetimes, each as one small method.

:class:`autosplit.runtime.lanes.lanes.StreamLane` holds the handshake and reaches the hardware through nothing else, so
that the same handshake runs on an accelerator and, in the tests, on streams that only write down what they were told.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from autosplit.devices.clocks import occupy


class Streams(Protocol):
    """What a lane needs of an accelerator; a stream and an event are whatever the implementation makes of them."""

    def new(self, device: torch.device) -> Any:
        """Return a new stream of a device."""

    def current(self, device: torch.device) -> Any:
        """Return the calling thread's current stream of a device."""

    def using(self, *streams: Any) -> AbstractContextManager[Any]:
        """Make each stream the current one of its device."""

    def event(self, stream: Any) -> Any:
        """Return an event that is reached when the work issued to a stream so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of a stream wait for an event; the host goes on."""

    def timed(self, stream: Any) -> Any:
        """Return an event as `event` does, that takes the time when it is reached."""

    def seconds(self, first: Any, then: Any) -> float:
        """Wait for two timed events of one device and return how long after the first the other was reached."""

    def occupy(self, stream: Any, seconds: float) -> None:
        """Give a stream work of at least so long that uses nothing of the device but the time."""

    def held_bytes(self, device: torch.device) -> int | None:
        """Return the bytes of a device that tensors have now, by the host's clock; None where nobody counts them."""

    def watch_peak(self, device: torch.device) -> None:
        """Forget the most bytes that tensors had on a device so far."""

    def peak_bytes(self, device: torch.device) -> int | None:
        """Return the most bytes that tensors had on a device since `watch_peak`; None where nobody counts them."""

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor lies on."""

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU tensor in pinned memory, made when the call returns."""

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Issue a copy to another device on the current streams of both and return it at once."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Have a tensor's memory, once freed, wait for the work issued to a stream by then before it is used again."""


class DeviceStreams:
    """The streams and events of an accelerator, by torch's module for its kind; it has no state of its own."""

    def new(self, device: torch.device) -> torch.Stream:
        """Return a stream of torch's pool; on CUDA torch hands out the same 32 per device in turn."""
        return _module(device).Stream(device)

    def current(self, device: torch.device) -> torch.Stream:
        """Return the calling thread's current stream of a device."""
        return _module(device).current_stream(device)

    def using(self, *streams: torch.Stream) -> AbstractContextManager[Any]:
        """Make each stream the current one of its device; at the end the current device is what it was."""
        if len(streams) == 1:
            return _module(streams[0].device).stream(streams[0])
        stack = ExitStack()
        for stream in streams:
            stack.enter_context(_module(stream.device).stream(stream))
        return stack

    def event(self, stream: torch.Stream) -> torch.Event:
        """Record a new event on a stream."""
        return stream.record_event()

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make a stream wait for an event, which may be another device's."""
        stream.wait_event(event)

    def timed(self, stream: torch.Stream) -> torch.Event:
        """Record a new event with a time on a stream."""
        event = _module(stream.device).Event(enable_timing=True)
        event.record(stream)
        return event

    def seconds(self, first: torch.Event, then: torch.Event) -> float:
        """Return the time between two events of one device, whose clock may count in half microseconds."""
        then.synchronize()
        return first.elapsed_time(then) / 1e3

    def occupy(self, stream: torch.Stream, seconds: float) -> None:
        """Spin on one multiprocessor for as many cycles as the fastest clock has in that time."""
        with _module(stream.device).stream(stream):
            occupy(seconds)

    def held_bytes(self, device: torch.device) -> int:
        """Return what the caching allocator has given out."""
        return _module(device).memory_allocated(device)

    def watch_peak(self, device: torch.device) -> None:
        """Reset the caching allocator's peak, which is the whole process's."""
        _module(device).reset_peak_memory_stats(device)

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most that the caching allocator has given out at once."""
        return _module(device).max_memory_allocated(device)

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Return the tensor's device."""
        return tensor.device

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory, also what is pinned already: its owner may change it before the copy is through."""
        return torch.empty_like(tensor, requires_grad=False, pin_memory=True).copy_(tensor)

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy without waiting; torch puts a copy to the CPU into pinned memory.

        Between two devices torch issues the copy to the source's current stream and has the two current streams
        wait for each other before and after.
        """
        return tensor.to(device, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Call ``record_stream``: the caching allocator puts an event on the stream when the tensor is freed."""
        tensor.record_stream(stream)


def generators_of(tree: Any) -> list[torch.Generator]:
    """Return the generators that an operation may draw from: the CPU's, and those of the devices that it is given.

    A device is given by tensors, at any depth, or by its name, as to an operation that makes a new tensor.
    """
    found: dict[tuple[str, int], torch.Generator] = {}
    for leaf in pytree.tree_leaves(tree):
        device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(device, str):
            with suppress(RuntimeError):  # a text of another kind
                device = torch.device(device)
        if isinstance(device, torch.device) and device.type not in ("cpu", "meta"):
            module = _module(device)
            index = module.current_device() if device.index is None else device.index
            found[device.type, index] = module.default_generators[index]
    return [torch.default_generator, *found.values()]


def _module(device: torch.device) -> Any:
    """Return torch's module for a kind of accelerator: ``torch.cuda``, ``torch.xpu``."""
    return torch.get_device_module(device)
