"""A lane: where one stage's actions run in order. The one place that asks what a device is.

A lane of an accelerator has a compute stream, and a copy stream for each direction. A bundle y goes from s to t:

    lane s  compute   ── y ──●                                     ● an event: every ─► is a stream that waits for it
            outbound         │         ┌─► copy ──┐
                             │         ●          │                torch's own barrier around a copy
    lane t  inbound          ├─► ──────┘          └─► ●
            compute          └─► ─────────────────────┴─► use

On one device y stays where it is, and only the compute stream waits. The allocator is told of every stream that uses
memory which another stream allocated. The backward mirrors this: gradients are fetched by lane s from lane t.

:class:`StreamLane` holds this handshake and reaches the hardware through :class:`Streams` only, so that the same
handshake runs on an accelerator and, in the tests, on streams that only write down what they were told.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch

from autosplit.devices import Clock, CudaClock

Bundle = tuple[torch.Tensor, ...]
_NOTHING = nullcontext()


class Lane:
    """One stage's device and its order of work.

    As it is here it is the CPU's, whose work is done when the call returns: there is nothing to record or to keep.
    """

    device: torch.device
    asynchronous = False
    """Whether work may still be under way when the call that issued it has returned."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @property
    def clock(self) -> Clock:
        """The time on the lane's device, and the bytes that tensors have there."""
        return Clock(threads=1)

    def record(self) -> Any:
        """Return an event that is reached when the compute issued so far is done; None where it is done by now."""

    def wait(self, event: Any) -> None:
        """Make later work of this lane, copies too, wait for an event of another lane; on the CPU the host waits."""
        if event is not None:
            event.synchronize()

    def active(self) -> AbstractContextManager[Any]:
        """Make the lane's compute stream the current one."""
        return _NOTHING

    def fetch(self, bundle: Bundle, source: Lane) -> Bundle:
        """Bring a bundle of another lane here, without gradients: a copy, or on one device the tensors themselves.

        This lane must have waited for an event that ``source`` recorded after the bundle was made. What the model
        itself keeps on a third device, such as lengths on the CPU, stays there.
        """
        return source.to_host(bundle)

    def to_host(self, bundle: Bundle) -> Bundle:
        """Return a bundle of this lane on the CPU, when the host may read it.

        The host must have waited for the event after which the bundle is ready.
        """
        return bundle

    def keep(self, tensor: torch.Tensor) -> None:
        """Have the memory of a tensor that another lane made outlive the work that this lane is given on it."""

    def stamp(self, *, copies: bool = False) -> Any:
        """Return the time when the lane is through with what it was given so far, or an event that takes it then.

        With ``copies`` it is that of the copies that end here, and of what they wait for.
        """
        return self.clock.stamp()

    def now(self) -> Lane:
        """Return this lane as it is now, for another thread: a caller's lane with its stream of this moment."""
        return self

    def here(self) -> Lane:
        """Return the caller's lane on this lane's device."""
        return self

    def origin(self, tensor: torch.Tensor) -> Lane:
        """Return the caller's lane on the device of one of the caller's tensors."""
        return caller_lane(tensor.device)


class _Queues(NamedTuple):
    """The streams of a lane: for its stages, and for copies that end or start here."""

    compute: Any
    inbound: Any
    outbound: Any


class StreamLane(Lane):
    """A compute stream, and one copy stream per direction, of one accelerator; they are made at the first use.

    Copies in and out have a stream each: on a single one, the next microbatch's copy in would queue behind this
    microbatch's copy out, which waits for the compute that the copy in should overlap with.
    """

    asynchronous = True

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self.device = device
        self.streams = Streams() if streams is None else streams
        self._queues: _Queues | None = None

    def __reduce__(self) -> Any:
        return type(self), (self.device, self.streams)

    @property
    def queues(self) -> _Queues:
        """The lane's streams; all are made at once, in the caller's thread: a backward uses lanes from several."""
        if self._queues is None:
            self._queues = _Queues(*(self.streams.new(self.device) for _ in _Queues._fields))
        return self._queues

    @property
    def clock(self) -> Clock:
        """The device's clock."""
        return self.streams.clock(self.device)

    def record(self) -> Any:
        """Record an event on the compute stream."""
        return self.streams.event(self.queues.compute)

    def wait(self, event: Any) -> None:
        """Make the compute stream and the stream of incoming copies wait for an event; None is reached already."""
        if event is not None:
            for stream in dict.fromkeys((self.queues.compute, self.queues.inbound)):
                self.streams.wait(stream, event)

    def active(self) -> AbstractContextManager[Any]:
        """Make the compute stream the current one of its device."""
        return self.streams.using(self.queues.compute)

    def fetch(self, bundle: Bundle, source: Lane) -> Bundle:
        """Bring a bundle here; on another device by a copy, which the compute stream waits for."""
        if source.device != self.device:
            bundle = self._copied(bundle, source)
            self.streams.wait(self.queues.compute, self.streams.event(self.queues.inbound))
        for tensor in bundle:
            self.keep(tensor)
        return bundle

    def _copied(self, bundle: Bundle, source: Lane) -> Bundle:
        streams = self.streams
        moving = [tensor for tensor in bundle if streams.device(tensor) == source.device]
        if isinstance(source, StreamLane):
            streams.wait(source.queues.outbound, streams.event(self.queues.inbound))
            with streams.using(source.queues.outbound, self.queues.inbound):
                copies = [streams.copy(tensor, self.device) for tensor in moving]
            for tensor in moving:
                streams.keep(tensor, source.queues.outbound)
        else:
            staged = [streams.staged(tensor) for tensor in moving]
            with streams.using(self.queues.inbound):
                copies = [streams.copy(tensor, self.device) for tensor in staged]
        arrived = iter(copies)
        return tuple(next(arrived) if streams.device(tensor) == source.device else tensor for tensor in bundle)

    def to_host(self, bundle: Bundle) -> Bundle:
        """Copy on the stream of outgoing copies, which the host waits for."""
        streams, host = self.streams, torch.device("cpu")
        with streams.using(self.queues.outbound):
            copies = tuple(streams.copy(t, host) if streams.device(t) == self.device else t for t in bundle)
        streams.event(self.queues.outbound).synchronize()
        return copies

    def keep(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the compute stream uses a tensor of this device."""
        if self.streams.device(tensor) == self.device:
            self.streams.keep(tensor, self.queues.compute)

    def stamp(self, *, copies: bool = False) -> Any:
        """Record an event that takes the time, on the compute stream or on that of incoming copies."""
        return self.clock.stamp(self.queues.inbound if copies else self.queues.compute)

    def here(self) -> Lane:
        """Return the caller's lane on this lane's device."""
        return CallerLane(self.device, self.streams)

    def origin(self, tensor: torch.Tensor) -> Lane:
        """Return the caller's lane on the device of one of the caller's tensors."""
        device = self.streams.device(tensor)
        return Lane() if device.type == "cpu" else CallerLane(device, self.streams)


class CallerLane(StreamLane):
    """The caller's work on one accelerator: the calling thread's current stream, looked up at each use.

    Given a stream, it is that one; its copies run on the same stream.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None, *, stream: Any = None) -> None:
        super().__init__(device, streams)
        self.stream = stream

    @property
    def queues(self) -> _Queues:
        """The one stream, for everything."""
        stream = self.streams.current(self.device) if self.stream is None else self.stream
        return _Queues(stream, stream, stream)

    def now(self) -> CallerLane:
        """Return the lane with the stream that is current now: in the backward another thread has another one."""
        return CallerLane(self.device, self.streams, stream=self.queues.compute)

    def here(self) -> Lane:
        """Return the lane itself."""
        return self


def lane(device: torch.device) -> Lane:
    """Return the lane of a stage on a device."""
    return Lane() if device.type == "cpu" else StreamLane(device)


def caller_lane(device: torch.device) -> Lane:
    """Return the lane of the caller on a device."""
    return Lane() if device.type == "cpu" else CallerLane(device)


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

    def clock(self, device: torch.device) -> Clock:
        """Return a device's clock."""
        return CudaClock(device)

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


def generators() -> list[torch.Generator]:
    """Return the generators that operations of the active lane draw from: the CPU's, and its device's."""
    drawn_from, accelerator = [torch.default_generator], torch.accelerator.current_accelerator()
    if accelerator is not None and (module := _module(accelerator)).is_initialized():
        drawn_from.append(module.default_generators[module.current_device()])
    return drawn_from


def _module(device: torch.device) -> Any:
    """Return torch's module for a kind of accelerator: ``torch.cuda``, ``torch.xpu``."""
    return torch.get_device_module(device)
