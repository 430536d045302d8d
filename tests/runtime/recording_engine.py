"""What autograd's engine does with streams, done to :class:`tests.runtime.recording_lane.RecordingStreams`.

By torch's own contract (``InputBuffer.cpp``, "Autograd Producer-Consumer Stream Syncs"), every node has a canonical
stream: the one that was current on its outputs' device when they were made. A node runs on it, with the caller's
streams current elsewhere; before that it waits for the canonical streams of the nodes that its gradients come from,
and tells the allocator so. The gradients that a call begins with come from one node more, on the caller's stream of
the first one's device. Gradients that meet are added on the consumer's stream. At the end the caller's streams wait for
those of the leaves, and of the nodes whose gradients are returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autosplit import backward
from tests.runtime.happens_before import Keep, Wait
from tests.runtime.recording_lane import CPU, Dispatch, Event, RecordingStreams, Stream

_ENGINE = torch.autograd.Variable._execution_engine
_NODE = "recorded node"
_FROM_THE_HOST = frozenset({"tensor", "as_tensor", "asarray", "from_numpy"})
"""Constructors that copy the host's numbers from pageable memory, behind all that the stream was given."""
_TO_THE_HOST = frozenset({"tolist", "numpy", "cpu", "__array__"})
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass(frozen=True)
class _Node:
    """What is known of a node: its canonical stream, None on the CPU."""

    number: int
    stream: Stream | None
    is_leaf: bool


@dataclass(frozen=True)
class _Arrival:
    """A gradient on its way: the stream that it comes from, and an event there."""

    stream: Stream
    event: Event


Place = tuple[int, int]
"""A node's number and the position among its gradients."""


class Engine:
    """Gives every node of the graphs made under :meth:`recording` its canonical stream and follows backwards."""

    def __init__(self, streams: RecordingStreams) -> None:
        self.streams = streams
        self._nodes: list[_Node] = []
        self.mismatches: list[str] = []
        """Leaves whose stream is another than that of their gradient, of which torch warns."""
        self._arrived: dict[tuple[int, Place], _Arrival] = {}
        """Gradients on their way, by their object and where they go."""
        self._leaves: set[Stream] = set()
        self._running: ExitStack | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Log what is called in here, forward and backward."""
        apply = inspect.getattr_static(torch.autograd.Function, "apply")  # Python's in torch 2.13, C's in 2.15

        def applied(kind: Any, *args: Any) -> Any:
            result = apply.__get__(None, kind)(*args)
            self.adopt(result)
            return result

        with (
            mock.patch.object(torch.autograd.Function, "apply", classmethod(applied)),
            mock.patch.object(torch.autograd.Variable, "_execution_engine", self),
            mock.patch.object(backward, "_ENGINE", self),
            _Functions(self),
            _Operations(self),
        ):
            yield

    def adopt(self, result: Any) -> None:
        """Give the nodes behind a result the streams that are current now; in a capture nothing runs."""
        if self.streams.quiet:
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                self._adopt(leaf.grad_fn, self._current(leaf))

    def run_backward(
        self,
        roots: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
        keep: bool,
        create: bool,
        wanted: Sequence[torch.Tensor | GradientEdge] = (),
        **options: Any,
    ) -> Sequence[torch.Tensor | None]:
        """Run torch's engine; at the end the caller's streams wait for the leaves' and those of what is returned."""
        assert not self._arrived, "a backward inside a backward"
        places = [self._place(tensor) for tensor in (*roots, *wanted)]
        streams = [stream for seed in seeds if (stream := self._current(seed)) is not None]
        for seed, (_, place) in zip(seeds, places, strict=False):
            if streams:
                self._arrived[id(seed), place] = _Arrival(streams[0], self.streams.event(streams[0]))
        found = _ENGINE.run_backward(roots, seeds, keep, create, wanted, **options)
        for gradient, (_, place) in zip(found or (), places[len(roots) :], strict=True):
            if gradient is not None:
                self._take(gradient, place)
                self._leaves |= {stream for stream in [self._nodes[place[0]].stream] if stream is not None}
        for stream in self._leaves:
            if stream is not self.streams.current(stream.device):
                self._wait(self.streams.current(stream.device), self.streams.event(stream))
        self._leaves.clear()
        self._arrived.clear()
        return found

    def _place(self, tensor: torch.Tensor | GradientEdge) -> tuple[Any, Place]:
        """Return where a tensor's gradient goes, and the node itself: one for a leaf lives as long as it is held."""
        if isinstance(tensor, GradientEdge):
            return tensor.node, (self._adopt(tensor.node, None).number, tensor.output_nr)
        edge = get_gradient_edge(tensor)
        return edge.node, (self._adopt(edge.node, self._current(tensor)).number, edge.output_nr)

    def _wait(self, stream: Stream, event: Event) -> None:
        self.streams.add(Wait(stream.name, event.number))

    def _current(self, tensor: torch.Tensor) -> Stream | None:
        device = self.streams.device(tensor)
        return None if device == CPU else self.streams.current(device)

    def _adopt(self, function: Any, stream: Stream | None) -> _Node:
        if _NODE in function.metadata:
            return function.metadata[_NODE]
        leaf = getattr(function, "variable", None)
        node = _Node(len(self._nodes), stream if leaf is None else self._current(leaf), leaf is not None)
        self._nodes.append(node)
        function.metadata[_NODE] = node
        following = [(None, 0) if f is None else (self._adopt(f, stream).number, i) for f, i in function.next_functions]
        function.register_prehook(lambda gradients: self._begin(node, gradients))
        function.register_hook(lambda given, _: self._end(node, given, following))
        return node

    def _begin(self, node: _Node, gradients: Any) -> None:
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                self._take(gradient, (node.number, position))
        self._running = ExitStack()
        if node.stream is not None:
            self._running.enter_context(self.streams.using(node.stream))

    def _take(self, gradient: torch.Tensor, place: Place) -> None:
        """Have a node's stream wait until a gradient is ready; to a leaf it goes in the end."""
        arrival, here = self._arrived.pop((id(gradient), place), None), self._current(gradient)
        if here is None:
            return
        assert arrival is not None, "a gradient from nowhere"
        node = self._nodes[place[0]]
        stream = node.stream or here
        if node.is_leaf:
            self._leaves.add(stream)
        if stream is arrival.stream:
            return
        if node.is_leaf:
            self.mismatches.append(f"{arrival.stream.name} to {stream.name}")
        self._wait(stream, arrival.event)
        if stream.device == here.device:
            self.streams.add(Keep(stream.name, self.streams.memory(gradient)))

    def _end(self, node: _Node, gradients: Any, following: list[tuple[int | None, int]]) -> None:
        assert self._running is not None
        self._running.close()
        self._running = None
        for gradient, (number, position) in zip(gradients, following, strict=False):
            if gradient is not None and number is not None:
                self._produced(gradient, node.stream, (number, position))

    def _produced(self, gradient: torch.Tensor, producer: Stream | None, place: Place) -> None:
        producer = producer or self._current(gradient)
        if producer is not None:
            self._arrived[id(gradient), place] = _Arrival(producer, self.streams.event(producer))

    def meeting(self, args: Any) -> Place | None:
        """Return where two gradients meet, when an operation is the engine's own addition of them."""
        if self._running is not None:
            return None
        first, second = ({place for key, place in self._arrived if key == id(leaf)} for leaf in args[:2])
        return next(iter(first & second), None)

    def add(self, place: Place, function: Callable[..., torch.Tensor], first: Any, second: Any) -> torch.Tensor:
        """Add two gradients on the stream of the node that they go to."""
        for gradient in {id(gradient): gradient for gradient in (first, second)}.values():  # one, of a value + itself
            self._take(gradient, place)
        stream = self._nodes[place[0]].stream
        with self.streams.using(*[] if stream is None else [stream]):
            result = function(first, second)
        self._produced(result, stream, place)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device, name = kwargs.get("device"), getattr(function, "__name__", "")
        if device is not None and torch.device(device).type == "cuda":  # a constructor: the card is not there
            if name in _FROM_THE_HOST:
                self.engine.streams.host_reads.append(name)
            return self.engine.streams.put(function(*args, **{**kwargs, "device": "cpu"}), torch.device(device))
        if name in _TO_THE_HOST and self.engine.streams.device(args[0]) != CPU:
            self.engine.streams.host_reads.append(name)
        result = function(*args, **kwargs)
        self.engine.adopt(result)
        return result


class _Operations(Dispatch):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.streams)
        self.engine = engine

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def call(*args: Any) -> Any:
            return super(_Operations, self).__torch_dispatch__(function, types, args, kwargs)

        place = self.engine.meeting(args) if function in _ADDITIONS else None
        return call(*args) if place is None else self.engine.add(place, call, *args)
