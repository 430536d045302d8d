"""A plan for one process per device: host threads, links, messages, and what NCCL keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit import Plan, plan
from autosplit.options import Options
from autosplit.planning.plan.record import Boundary
from autosplit.planning.profiled.messages import sending_pairs, waiting_bytes
from autosplit.planning.profiled.specs import link_factors, link_seconds
from autosplit.report.sections import render
from autosplit.schedule.catalog import build
from cost_models import machine, registry

MIB = 2**20
LINKED, PCIE = 32 * 12 * MIB, 2 * 12 * MIB
"""What NCCL keeps of a device for a neighbour that it sends to and receives from."""


class Skip(nn.Module):
    """Six layers; the first one's output is added to the last one's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = torch.relu(layer(y))
        return y + first


def planned(devices: str, model: nn.Module | None = None, *, rows: int = 4096, **choices: Any) -> Plan:
    if model is None:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    sample = torch.empty(rows, next(model.parameters()).shape[1], device="meta")
    choices = {"chunks": 8, "schedule": "1f1b", "loss_fn": lambda y: y.sum(), **choices}
    return plan(model, devices, sample=sample, **choices)


def kept(found: Plan) -> tuple[int, ...]:
    return tuple(stage.memory.communicator_bytes for stage in found.stages)


def test_each_process_issues_for_its_device() -> None:
    one, many = (planned("4xL4-24GB", rows=64, processes=own) for own in (False, True))
    assert [(found.processes, found.issue_threads) for found in (one, many)] == [(False, 1), (True, 4)]
    assert many.step_s == one.step_s
    [bound] = [reason for reason in one.reasons if "issue" in reason]
    assert bound.startswith("host-bound: one host thread issues")
    assert not any("host-bound" in reason for reason in many.reasons)
    assert ", a process for each" in render(many)
    assert ", a process for each" not in render(one)


def test_nccl_keeps_of_the_capacity_what_the_pairs_need() -> None:
    one, many = (planned("4xH100-SXM5-80GB", processes=own) for own in (False, True))
    assert kept(one) == (0, 0, 0, 0)
    assert kept(many) == (LINKED, 2 * LINKED, 2 * LINKED, LINKED)
    for alone, own in zip(one.stages, many.stages, strict=True):
        assert alone.memory.capacity_bytes is not None
        assert own.memory.capacity_bytes == alone.memory.capacity_bytes - own.memory.communicator_bytes
    line = "NCCL's buffers are taken from the capacity, by device: 384 MiB on 0, 3, 768 MiB on 1-2"
    assert line in render(many)
    assert "NCCL" not in render(one)
    assert kept(planned("4xL4-24GB", processes=True, schedule="forward")) == (2 * 2 * MIB, PCIE, PCIE, 2 * 10 * MIB)
    limited = planned("4xH100-SXM5-80GB", processes=True, memory_limit="1GiB")
    assert {stage.memory.capacity_bytes for stage in limited.stages} == {2**30}


def test_a_skip_has_communicators_of_its_own() -> None:
    with torch.device("meta"):
        model = Skip(1024)
    found = planned("3xL4-24GB", model, processes=True)
    assert {(t.producer, t.consumer) for t in found.transfers} == {(0, 1), (1, 2), (0, 2)}
    assert kept(found) == (2 * PCIE,) * 3


@pytest.mark.parametrize("processes", [False, True])
def test_stages_on_different_hosts_send_through_the_network(*, processes: bool) -> None:
    found, own = planned("2x2xH100-SXM5-80GB", processes=processes), machine("2x2xH100-SXM5-80GB")
    sent = {boundary.producer: boundary.bytes for boundary in found.boundaries}
    seconds = {(t.producer, t.consumer): t.forward_s for t in found.transfers}
    assert [own.link(stage, stage + 1).name for stage in range(3)] == ["NVLink 4", "network", "NVLink 4"]
    links = {(stage, stage + 1): own.link(stage, stage + 1).transfer_s(sent[stage]) for stage in range(3)}
    assert seconds == pytest.approx(links)
    assert max(seconds[0, 1], seconds[2, 3]) < seconds[1, 2] / 3


def test_messages_wait_on_both_ends_of_a_link() -> None:
    sent = (
        Boundary(value="x", producer=-1, consumers=(0,), bytes=1),
        Boundary(value="a", producer=0, consumers=(1, 2), bytes=10),
        Boundary(value="mask", producer=0, consumers=(1,), bytes=100),
        Boundary(value="tied", producer=0, consumers=(2,), bytes=1000, per_step=True),
    )
    flows = {"a": True, "mask": False}
    schedule = build("1f1b", stages=3, microbatches=4)
    assert waiting_bytes(sent, schedule, flows) == {0: 20, 1: 120, 2: 20}
    assert sending_pairs(sent, schedule) == {(0, 1), (1, 0), (0, 2), (2, 0)}
    forward = build("forward", stages=3, microbatches=4)
    assert waiting_bytes(sent, forward, flows) == {0: 0, 1: 110, 2: 10}
    assert sending_pairs(sent, forward) == {(0, 1), (0, 2)}
    looped = build("interleaved", stages=4, microbatches=4, virtual_stages=2)
    assert sending_pairs(sent, looped) == {(0, 1), (1, 0)}
    assert waiting_bytes(sent, looped, flows) == {0: 10, 1: 120}
    dealt = build("1f1b", stages=3, microbatches=4, replicas=(2, 1, 1))
    assert waiting_bytes(sent, dealt, flows) == {0: 20, 1: 20, 2: 120, 3: 20}
    assert sending_pairs(sent, dealt) == {
        pair for a, b in ((0, 2), (1, 2), (0, 3), (1, 3)) for pair in ((a, b), (b, a))
    }


def test_messages_are_part_of_the_peak_and_of_the_curves() -> None:
    one, many = (planned("2xcpu-lane", processes=own) for own in (False, True))
    [size] = [boundary.bytes for boundary in many.boundaries if boundary.producer == 0]
    more = [own.memory.peak_bytes - alone.memory.peak_bytes for alone, own in zip(one.stages, many.stages, strict=True)]
    assert more == [size, 2 * size]
    for stage, curve in zip(many.stages, many.curves, strict=True):
        assert max(map(sum, zip(*curve.kinds, strict=True))) == stage.memory.peak_bytes


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    properties = type("Properties", (), {"total_memory": 80 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("cards")
def test_links_and_buffers_are_those_of_the_cards_and_their_hosts() -> None:
    devices = (torch.device("cuda", 0),) * 4  # every rank names its own
    options = Options(devices, chunks=2, processes=True, hosts=(0, 0, 1, 1))
    assert [options.world.host_of(lane) for lane in range(4)] == [0, 0, 1, 1]
    assert [link.name for link in options.links] == ["NVLink 4", "network", "NVLink 4"]
    assert link_seconds(options, 2**30) == registry.network().transfer_s(2**30)
    factors = link_factors(options, 64 * 1024)
    assert factors is not None
    assert factors[1] == 1.0 > factors[0] == factors[2]
    # A small message is mostly latency: it takes as long on a link inside a host as that link says.
    assert factors[0] * link_seconds(options, 64 * 1024) == pytest.approx(options.links[0].transfer_s(64 * 1024))
    assert options.capacity_bytes(0) == 80 * 2**30 - LINKED
    assert options.capacity_bytes(1) == 80 * 2**30 - LINKED - 128 * MIB
    near = Options(devices, chunks=2, processes=True)
    assert [link.name for link in near.links] == ["NVLink 4"] * 3
    assert near.capacity_bytes(1) == 80 * 2**30 - 2 * LINKED
    alone = Options(devices, chunks=2)
    assert alone.links == ()
    assert alone.capacity_bytes(0) == 80 * 2**30


def test_processes_on_cpu_lanes_send_through_gloo() -> None:
    options = Options((torch.device("cpu"),) * 3, chunks=2, processes=True)
    assert link_seconds(options, 65536) == pytest.approx(30e-6, rel=0.05)
    assert link_seconds(options, 4 * MIB) == pytest.approx(0.8e-3, rel=0.05)
    assert link_factors(options, MIB) is None
    assert options.communicator_bytes([(0, 1)]) == (0, 0, 0)
    assert link_seconds(Options((torch.device("cpu"),), chunks=2, processes=True), MIB) == 0.0
