"""Graphs on a machine without a GPU: a capture notes torch's operations, a replay does them again in the same memory.

As on a device:

- a capture does nothing: what it made is garbage until the first replay, what it wrote to is as it was;
- a replay runs no Python: the same operations on the same memory, numbers and addresses as they were captured;
- memory that nobody refers to after the capture may be another graph's: it is garbage before and after every replay;
- what a graph keeps may lie where an earlier graph of its pool worked: that one's replay makes it garbage;
- what waits for the device, or reads a value, is an error in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.runtime.recording_lane import RecordingStreams, Stream

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class _Operation:
    """One operation: its operands, and the memory that it makes."""

    def __init__(self, function: Any, args: Any, kwargs: Any, result: Any, generator: torch.Generator | None) -> None:
        self.function, self.generator = function, generator
        self.args, self.kwargs = tree_map_only(Tensor, _same_memory, (args, kwargs))
        self.result = [_same_memory(t) if isinstance(t, Tensor) else None for t in tree_leaves(result)]

    def again(self, made: set[int]) -> None:
        with _drawing_from(self.generator) if self.generator is not None else _nothing():
            found = tree_leaves(self.function(*self.args, **self.kwargs))
        for old, new in zip(self.result, found, strict=True):
            if old is not None and _memory(old) in made and _memory(old) != _memory(new):
                old.copy_(new)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs, self.result)) if isinstance(leaf, Tensor)]


class _Capture(TorchDispatchMode):
    def __init__(self, streams: GraphStreams) -> None:
        super().__init__()
        self.streams = streams
        self.operations: list[_Operation] = []
        self.made: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
        for argument in function._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(given.get(argument.name)):
                    if _memory(tensor) not in self.made:
                        self.before.setdefault(_memory(tensor), (_same_memory(tensor), tensor.detach().clone()))
        result = function(*args, **kwargs)
        known = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if _memory(tensor) not in known:
                self.made.setdefault(_memory(tensor), _same_memory(tensor))
        self.operations.append(_Operation(function, args, kwargs, result, self.streams.drawn_from))
        return result


class FakeGraph:
    """What a capture noted."""

    def __init__(self, capture: _Capture, generators: Sequence[torch.Generator], stream: Stream, pool: object) -> None:
        self.operations, self.made, self.stream, self.pool = capture.operations, capture.made, stream, pool
        used = {id(operation.generator) for operation in self.operations} - {id(None)}
        assert used <= {id(generator) for generator in generators}, "a generator that the graph does not know"
        for tensor, content in capture.before.values():
            tensor.copy_(content)
        mine: dict[int, int] = {}
        for tensor in (*self.made.values(), *(t for operation in self.operations for t in operation.tensors())):
            mine[_memory(tensor)] = mine.get(_memory(tensor), 0) + 1
        self.passing = [t for key, t in self.made.items() if _uses(t) <= mine[key]]
        """Memory that is the graph's only while it runs."""
        self.kept = [t for key, t in self.made.items() if _uses(t) > mine[key]]
        for tensor in self.made.values():
            _spoil(tensor)

    def reads_and_writes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the memory that is there before a replay and is read, and that which is written and stays."""
        every = {_memory(t): t for operation in self.operations for t in operation.tensors()}
        outside = [tensor for key, tensor in every.items() if key not in self.made]
        written = {
            _memory(tensor): tensor
            for operation in self.operations
            for argument, value in zip(operation.function._schema.arguments, operation.args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
            if _memory(tensor) not in self.made
        }
        return outside, [*self.kept, *written.values()]

    def replay(self) -> None:
        for tensor in self.passing:
            _spoil(tensor)
        with torch.no_grad():
            for operation in self.operations:
                operation.again(set(self.made))
        for tensor in self.passing:
            _spoil(tensor)


class GraphStreams(RecordingStreams):
    """Recording streams of a device that has graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[FakeGraph] = []
        self.replays = 0
        self.capturing = False
        self.drawn_from: torch.Generator | None = None
        self.fails: Callable[[], bool] = lambda: False
        """Tells whether the next capture fails."""

    def pool(self, device: torch.device) -> object:
        return object()

    def capture(
        self, work: Callable[[], None], stream: Stream, pool: object, generators: Sequence[torch.Generator]
    ) -> FakeGraph:
        if self.fails():
            raise RuntimeError("operation not permitted when stream is capturing")
        noted = _Capture(self)
        with self.silent(), self.using(stream):
            try:
                self.capturing = True
                with noted:
                    work()
            except BaseException:
                for tensor, content in noted.before.values():
                    tensor.copy_(content)
                raise
            finally:
                self.capturing = False
            graph = FakeGraph(noted, generators, stream, pool)
        self.graphs.append(graph)
        return graph

    def replay(self, graph: FakeGraph) -> None:
        assert self.current(graph.stream.device) is graph.stream, "a replay on another stream: memory is the pool's"
        self.replays += 1
        with self.silent():
            for later in self.graphs[self.graphs.index(graph) + 1 :]:
                for tensor in later.kept if later.pool is graph.pool else ():
                    _spoil(tensor)
            graph.replay()
        reads, writes = graph.reads_and_writes()
        self.work(graph.stream.name, "replay", graph.stream.device, reads=reads, writes=writes)

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator()

    @contextmanager
    def drawing(self, generator: torch.Generator) -> Iterator[None]:
        self.drawn_from = generator
        try:
            with _drawing_from(generator):
                yield
        finally:
            self.drawn_from = None

    @contextmanager
    def silent(self) -> Iterator[None]:
        self.quiet, before = True, self.quiet
        try:
            yield
        finally:
            self.quiet = before


class HostStreams(GraphStreams):
    """Graphs of the CPU itself, with nothing to wait for and nothing to log: for what the numbers are."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        pass

    def add(self, entry: Any) -> None:
        pass

    def work(self, *given: Any, **named: Any) -> None:
        pass


@contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _same_memory(tensor: Tensor) -> Tensor:
    return tensor.data


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _uses(tensor: Tensor) -> int:
    """Return how many tensors have a tensor's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def _spoil(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
    whole.fill_(255)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
