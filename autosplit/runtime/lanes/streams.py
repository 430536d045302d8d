"""The seam to the accelerator: streams, events, copies and lifetimes, each as one small method.

:class:`autosplit.runtime.lanes.lanes.StreamLane` holds the handshake and reaches the hardware through nothing else, so
that the same handshake runs on an accelerator and, in the tests, on streams that only write down what they were told.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
import torch.utils._pytree as pytree

from autosplit.devices.clocks import occupy


class Streams:
    """What a lane needs of an accelerator, by torch's module for its kind; it has no state of its own."""

    def new(self, device: torch.device) -> Any:
        """Return a stream of torch's pool; on CUDA torch hands out the same 32 per device in turn."""
        return _module(device).Stream(device)

    def current(self, device: torch.device) -> Any:
        """Return the calling thread's current stream of a device."""
        return _module(device).current_stream(device)

    def using(self, *streams: Any) -> AbstractContextManager[Any]:
        """Make each stream the current one of its device; at the end the current device is what it was."""
        if len(streams) == 1:
            return _module(streams[0].device).stream(streams[0])
        stack = ExitStack()
        for stream in streams:
            stack.enter_context(_module(stream.device).stream(stream))
        return stack

    def event(self, stream: Any) -> Any:
        """Return a new event that is reached when the work issued to a stream so far is done."""
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of a stream wait for an event, which may be another device's; the host goes on."""
        stream.wait_event(event)

    def timed(self, stream: Any) -> Any:
        """Return an event as `event` does, that takes the time when it is reached."""
        event = _module(stream.device).Event(enable_timing=True)
        event.record(stream)
        return event

    def seconds(self, first: Any, then: Any) -> float:
        """Wait for two timed events of one device, which may count in half microseconds; return the time between."""
        then.synchronize()
        return first.elapsed_time(then) / 1e3

    def occupy(self, stream: Any, seconds: float) -> None:
        """Keep one multiprocessor busy for at least so long: as many cycles as the fastest clock has in that time."""
        with _module(stream.device).stream(stream):
            occupy(seconds)

    def held_bytes(self, device: torch.device) -> int:
        """Return the bytes that the caching allocator has given out, by the host's clock."""
        return _module(device).memory_allocated(device)

    def watch_peak(self, device: torch.device) -> None:
        """Reset the caching allocator's peak, which is the whole process's."""
        _module(device).reset_peak_memory_stats(device)

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most that the caching allocator has given out at once since `watch_peak`."""
        return _module(device).max_memory_allocated(device)

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor lies on."""
        return tensor.device

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory, also what is pinned already: its owner may change it before the copy is through."""
        return torch.empty_like(tensor, requires_grad=False, pin_memory=True).copy_(tensor)

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy without waiting, on the current streams of both; torch puts a copy to the CPU into pinned memory.

        Between two devices torch issues the copy to the source's current stream and has the two current streams
        wait for each other before and after.
        """
        return tensor.to(device, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Have a tensor's memory, once freed, wait for the work issued to a stream by then before it is used again."""
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
