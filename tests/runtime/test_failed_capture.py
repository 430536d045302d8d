"""What torch is told when a capture fails, by a fake of torch.cuda that notes the calls in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosplit.runtime import streams as streams_module
from autosplit.runtime.streams import CudaStreams

STREAM: Any = SimpleNamespace(device=torch.device("cpu", 0))
POOL = (0, 7)


class Device:
    """A device whose captures torch cannot end when what they capture raises."""

    def __init__(self) -> None:
        self.calls, self.under_way, self.made = list[Any](), set[Any](), list[Any]()

    def new(self) -> Any:
        name = f"graph {len(self.made)}"

        def register(generator: Any) -> None:
            self.calls.append(("register", name, generator))

        self.made.append(SimpleNamespace(name=name, register_generator_state=register))
        return self.made[-1]

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any = None, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert stream is STREAM
        assert capture_error_mode == "thread_local"
        self.calls.append(("begin", graph.name))
        self.under_way.add(pool)
        yield
        self.under_way.discard(pool)
        self.calls.append(("end", graph.name))

    def end_allocate(self, device: int, pool: Any) -> None:
        self.calls.append(("end allocate", device, pool))
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.discard(pool)

    def release(self, device: int, pool: Any) -> None:
        self.calls.append(("release", device, pool))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(streams_module, "_FAILED", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.new)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocate, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    return made


def failing() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_capture_is_over_for_the_allocator_and_the_generators(card: Device) -> None:
    generator: Any = "generator"
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaStreams().capture(failing, STREAM, POOL, [generator])
    assert card.calls == [
        ("register", "graph 0", generator),
        ("begin", "graph 0"),
        ("end allocate", 0, POOL),
        ("release", 0, POOL),
        ("register", "graph 1", generator),
        ("begin", "graph 1"),
        ("end", "graph 1"),
    ]
    assert not card.under_way
    assert card.made[:1] == streams_module._FAILED, "the allocator holds its address"


def test_a_pool_that_torch_gave_back_is_not_released_twice(card: Device) -> None:
    def failing_at_the_end() -> None:
        card.under_way.discard(POOL)
        failing()

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaStreams().capture(failing_at_the_end, STREAM, POOL, [])
    assert ("release", 0, POOL) not in card.calls


def test_a_capture_that_succeeds_is_left_alone(card: Device) -> None:
    graph = CudaStreams().capture(lambda: None, STREAM, POOL, [])
    assert [graph] == card.made
    assert card.calls == [("begin", "graph 0"), ("end", "graph 0")]
    assert streams_module._FAILED == []
