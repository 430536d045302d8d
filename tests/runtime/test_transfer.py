"""What goes from lane to lane, and the lanes themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autosplit.runtime import ops
from autosplit.runtime.lanes.lanes import Lane, StreamLane, caller_lane, lane
from autosplit.runtime.transport import SharedMemory
from autosplit.schedule.entry import Route
from tests.runtime.happens_before import Keep, Op, Record, Wait
from tests.runtime.recording_engine import Engine
from tests.runtime.recording_lane import RecordingStreams, recording_lanes


def text(streams: RecordingStreams) -> list[str]:
    """Return the log as text, events by the stream that they are on, and empty it."""
    lines = []
    for entry in streams.log:
        match entry:
            case Op(stream, name):
                lines.append(f"{stream}: {name}")
            case Record(stream):
                lines.append(f"{stream}: record")
            case Wait(stream, event):
                lines.append(f"{stream}: wait for {streams.recorded_on[event]}")
            case Keep(stream):
                lines.append(f"{stream}: keep")
    streams.log.clear()
    return lines


HANDSHAKE = """
compute0: record
compute1: wait for compute0
inbound1: wait for compute0
inbound1: record
outbound0: wait for inbound1
outbound0: make contiguous
inbound1: allocate
inbound1: record
outbound0: wait for inbound1
outbound0: copy
outbound0: record
inbound1: wait for outbound0
outbound0: keep
inbound1: record
compute1: wait for inbound1
compute1: keep
""".strip()


def test_the_handshake_between_two_cards_and_its_mirror_image() -> None:
    streams = RecordingStreams()
    engine, lanes = Engine(streams), recording_lanes(streams, ["cuda:0", "cuda:1"])
    value = streams.put(torch.ones(2, requires_grad=True), lanes[0].device)
    with engine.recording():
        with lanes[0].active():
            made = value.exp()
        streams.log.clear()
        (moved,) = ops.transfer((made,), *lanes)
        assert "\n".join(text(streams)) == HANDSHAKE
        with lanes[1].active():
            total = moved.sum()
        total.backward()
    mirrored = HANDSHAKE.translate(str.maketrans("01", "10"))
    assert mirrored in "\n".join(text(streams))


@pytest.fixture
def two_cards() -> tuple[RecordingStreams, Sequence[Any]]:
    streams = RecordingStreams()
    return streams, recording_lanes(streams, ["cuda:0", "cuda:1"])


def test_only_what_has_a_gradient_gets_one_back(two_cards: tuple[RecordingStreams, Sequence[Any]]) -> None:
    streams, lanes = two_cards
    tensors = (torch.ones(2, requires_grad=True), torch.arange(2), torch.ones(2), torch.ones(2, requires_grad=True))
    bundle = tuple(streams.put(tensor, lanes[0].device) for tensor in tensors)
    moved = ops.transfer(bundle, *lanes)
    assert [tensor.requires_grad for tensor in moved] == [True, False, False, True]
    assert [tensor.dtype for tensor in moved] == [tensor.dtype for tensor in bundle]
    (moved[0] * 3).sum().backward()
    assert bundle[0].grad.tolist() == [3, 3]
    assert bundle[3].grad is None
    with torch.no_grad():
        assert not any(tensor.requires_grad for tensor in ops.transfer(bundle, *lanes))


def test_what_arrived_may_be_changed_in_place(two_cards: tuple[RecordingStreams, Sequence[Any]]) -> None:
    streams, lanes = two_cards
    value = streams.put(torch.ones(2, requires_grad=True), lanes[0].device)
    pair = ops.transfer((value * 1, value * 2), *lanes)
    (pair[0].mul_(5) + pair[1].add_(1)).sum().backward()
    assert value.grad.tolist() == [7, 7]


def test_lanes_are_copied_and_pickled_without_their_streams() -> None:
    for make in (lane, caller_lane):
        for device in ("cpu", "cuda:1"):
            own = make(torch.device(device))
            for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
                assert type(twin) is type(own)
                assert twin.device == own.device
    used = StreamLane(torch.device("cuda:0"), RecordingStreams())
    stream = used.queues.compute
    assert used.queues.compute is stream
    assert copy.deepcopy(used).queues.compute is not stream


@pytest.mark.parametrize("detached", [True, False])
def test_a_transport_brings_values_and_gradients_of_some_back(detached: bool) -> None:
    lanes = Lane(), Lane()
    transport = SharedMemory(lambda stage, microbatch: lanes[stage], None, detached=detached)
    route = Route(0, 1, microbatch=2)
    value = torch.ones(2, requires_grad=True) * 1
    transport.send(route, (value, torch.arange(2)))
    transport.send(route.back, (value.detach(), None))
    arrived, number = transport.recv(route)
    assert [arrived.requires_grad, number.requires_grad] == [True, False]
    assert (arrived.grad_fn is None) is detached
    assert arrived.data_ptr() == value.data_ptr()
    gradient, nothing = transport.recv(route.back)
    assert (gradient.tolist(), nothing) == ([1, 1], None)
    with pytest.raises(KeyError):
        transport.recv(route)
