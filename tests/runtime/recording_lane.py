"""Streams that write down what they are told, for the CUDA lane on a machine without one.

:class:`RecordingStreams` stands where ``Streams`` does, so the lanes and the programs under test are the shipped
ones. All tensors lie on the CPU; which device they would lie on, and which stream would work on them, is kept here:

- an operation runs on the current stream of its operands' device;
- a copy between two devices runs on the source's current stream, fenced by the target's, as torch does it;
- memory is free when the last reference to its storage is gone.

What autograd's engine does in a backward is added by :mod:`tests.runtime.recording_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosplit.devices import Clock
from autosplit.runtime.lanes.lanes import CallerLane, Lane, StreamLane
from tests.runtime.happens_before import HOST, Entry, Free, Keep, Op, Record, Wait

CPU = torch.device("cpu")
_WAITING = frozenset(
    f"aten::{name}"
    for name in "_local_scalar_dense item nonzero masked_select equal is_nonzero _unique2 unique_dim bincount".split()
)
"""Operations that give the host a device's numbers, or whose result is as large as these say."""


@dataclass(eq=False)
class Stream:
    """A stream that does nothing but have a name."""

    device: torch.device
    name: str


@dataclass(frozen=True)
class Event:
    """An event in a log."""

    number: int
    streams: RecordingStreams

    def synchronize(self) -> None:
        self.streams.wait(self.streams.host, self)


@dataclass(frozen=True)
class _Held:
    number: int
    device: torch.device
    storage: StorageWeakRef


class RecordingClock(Clock):
    """The time of recorded streams, in which one entry of a log takes a microsecond; a block is a byte."""

    def __init__(self, streams: RecordingStreams, device: torch.device) -> None:
        self.streams, self.device = streams, device

    def stamp(self, stream: Stream | None = None) -> Event:
        return self.streams.event(stream or self.streams.current(self.device))

    def seconds(self, first: Event, then: Event) -> float:
        then.synchronize()
        return (then.number - first.number) * 1e-6

    def occupy(self, seconds: float) -> None:
        self.streams.occupied.append((self.streams.current(self.device).name, seconds))

    def held_bytes(self) -> int:
        self.streams.collect()
        return sum(held.device == self.device for held in self.streams._memories.values())

    def watch_peak(self) -> None:
        self.streams.watched.append(self.device)

    def peak_bytes(self) -> int:
        assert self.device in self.streams.watched
        return self.held_bytes() + 1


class RecordingStreams:
    """The streams, and one log of all that they are told."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.recorded_on: dict[int, str] = {}
        """The stream of every event."""
        self.forget: Callable[[Wait | Keep], bool] = lambda entry: False
        """Picks waits and keeps of lanes that do not happen: what a lane would do that left them out."""
        self.forgotten = 0
        self.host = Stream(CPU, HOST)
        self.quiet = False
        self.host_reads: list[str] = []
        """What made the host wait until a device was through, other than an event."""
        self.watched: list[torch.device] = []
        """Devices whose peak was asked to be watched."""
        self.occupied: list[tuple[str, float]] = []
        """Streams that were kept at work, and for how long."""
        self._numbers = 0
        self._memories: dict[int, _Held] = {}
        self._pinned: set[int] = set()
        self._current: dict[torch.device, Stream] = {}

    # -- what a lane asks for ------------------------------------------------------------------------------------
    def new(self, device: torch.device) -> Stream:
        return Stream(device, f"{device} stream {self._number()}")

    def current(self, device: torch.device) -> Stream:
        if device not in self._current:
            self._current[device] = Stream(device, f"caller {device}")
        return self._current[device]

    @contextmanager
    def using(self, *streams: Stream) -> Iterator[None]:
        before = {stream.device: self.current(stream.device) for stream in streams}
        self._current.update({stream.device: stream for stream in streams})
        try:
            yield
        finally:
            self._current.update(before)

    def event(self, stream: Stream) -> Event:
        event = Event(self._number(), self)
        self.recorded_on[event.number] = stream.name
        self.add(Record(stream.name, event.number))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._ask(Wait(stream.name, event.number))

    def clock(self, device: torch.device) -> RecordingClock:
        return RecordingClock(self, device)

    def device(self, tensor: torch.Tensor) -> torch.device:
        held = self._memories.get(tensor.untyped_storage()._cdata)
        return CPU if held is None else held.device

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = self._twin(tensor)
        self.work(HOST, "stage", CPU, reads=[tensor], writes=[pinned])
        self._pinned.add(self.memory(pinned))
        return pinned

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        source, twin = self.device(tensor), self._twin(tensor)
        assert source != device, "a copy to where it is"
        if CPU in (source, device):
            stream = self.current(source if device == CPU else device)
            assert device == CPU or self.memory(tensor) in self._pinned, "a copy from pageable memory waits"
            self.work(stream.name, "copy", device, reads=[tensor], writes=[twin])
            self.add(Keep(stream.name, self.memory(tensor if device != CPU else twin)))  # the pinned allocator does
            return twin
        start, end = self.current(source), self.current(device)
        self.work(start.name, "make contiguous", source, reads=[tensor], writes=[])
        self.work(end.name, "allocate", device, reads=[], writes=[twin])
        self.add(Wait(start.name, self.event(end).number))
        self.work(start.name, "copy", device, reads=[tensor], writes=[twin])
        self.add(Wait(end.name, self.event(start).number))
        return twin

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert self.device(tensor) != CPU, "the CPU has no record_stream"
        self._ask(Keep(stream.name, self.memory(tensor)))

    def _ask(self, entry: Wait | Keep) -> None:
        if self.forget(entry):
            self.forgotten += 1
        else:
            self.add(entry)

    # -- the log -------------------------------------------------------------------------------------------------
    def add(self, entry: Entry) -> None:
        """Append an entry, after those for memory that is free by now."""
        self.collect()
        self.log.append(entry)

    def collect(self) -> None:
        """Append an entry for every memory that became free."""
        for key, held in [(k, h) for k, h in self._memories.items() if h.storage.expired()]:
            del self._memories[key]
            self.log.append(Free(held.number))

    def work(
        self, stream: str, name: str, device: torch.device, *, reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:
        """Log work on a stream; what it writes that was not there before it allocates on a device."""
        read = tuple(dict.fromkeys(self.memory(tensor) for tensor in reads))
        known = set(self._memories)
        written = tuple(dict.fromkeys(self.memory(tensor, device, at=stream) for tensor in writes))
        new = tuple(held.number for key, held in self._memories.items() if key not in known)
        self.add(Op(stream, name, read, written, new))

    def memory(self, tensor: torch.Tensor, device: torch.device = CPU, at: str | None = None) -> int:
        """Return the number of a tensor's memory; unknown memory was there all along, on the CPU."""
        storage = tensor.untyped_storage()
        held = self._memories.get(storage._cdata)
        if held is None:
            held = _Held(self._number(), device, StorageWeakRef(storage))
            if at is None:
                self.add(Op(HOST, "constant", (), (held.number,), (held.number,)))
            self._memories[storage._cdata] = held
        return held.number

    def put(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Have a tensor lie on a device, just written by the caller."""
        self._memories.pop(tensor.untyped_storage()._cdata, None)
        self.work(HOST if device == CPU else self.current(device).name, "put", device, reads=[], writes=[tensor])
        return tensor

    def operation(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Log one of torch's operations, on the current stream of its operands' device."""
        devices = {self.device(tensor) for tensor in reads} - {CPU}
        assert len(devices) <= 1, f"{name} works on {devices}"
        if not devices:
            self.work(HOST, name, CPU, reads=reads, writes=writes)
            return
        device = devices.pop()
        given = [tensor for tensor in reads if self.device(tensor) == device]  # a number on the CPU goes by value
        assert all(tensor.dim() == 0 for tensor in reads if self.device(tensor) == CPU), (
            f"{name} on the CPU and {device}"
        )
        self.work(self.current(device).name, name, device, reads=given, writes=writes)

    def look(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Note an operation whose result the host, or the size of whose result, depends on a device's numbers."""
        picks = name == "aten::index" and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        if (name in _WAITING or picks) and any(self.device(tensor) != CPU for tensor in tensors):
            self.host_reads.append(name)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.quiet, before = True, self.quiet
        try:
            return tensor.detach().clone()
        finally:
            self.quiet = before


class Dispatch(TorchDispatchMode):
    """Hands every operation to the log."""

    def __init__(self, streams: RecordingStreams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | (kwargs or {})
        result = function(*args, **(kwargs or {}))
        if self.streams.quiet:
            return result
        reads = _tensors(given)
        self.streams.look(function._schema.name, reads)
        known = {tensor.untyped_storage()._cdata for tensor in reads}
        writes = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
        for argument in function._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes += _tensors(given.get(argument.name))
        if writes:  # else it is a view
            self.streams.operation(function._schema.name, reads, writes)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class HostLane(Lane):
    """The lane of the CPU; it too asks the streams where a tensor lies."""

    def __init__(self, streams: RecordingStreams) -> None:
        super().__init__()
        self.streams = streams

    def origin(self, tensor: torch.Tensor) -> Lane:
        device = self.streams.device(tensor)
        return self if device == CPU else CallerLane(device, self.streams)


def recording_lanes(streams: RecordingStreams, devices: list[str]) -> list[StreamLane | Lane]:
    """Return a lane per device, with streams that are called ``compute0``, ``inbound0``, ``outbound0`` and so on."""
    lanes: list[StreamLane | Lane] = []
    for number, device in enumerate(devices):
        if device == "cpu":
            lanes.append(HostLane(streams))
            continue
        lane = StreamLane(torch.device(device), streams)
        for role, stream in lane.queues._asdict().items():
            stream.name = f"{role}{number}"
        lanes.append(lane)
    return lanes
