"""What a plan takes CUDA devices that are there for; the driver's answers are pretended, and nothing runs on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import plan
from autosplit.options import Options, Sample
from autosplit.planning.explain.reasons import reasons
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.problem import _lies_on
from autosplit.planning.profiled.specs import link_seconds, spec_of
from autosplit.planning.search.make import make_plan
from autosplit.trace.ladder import trace
from cost_models import registry

WIDTH, ROWS, CHUNKS = 256, 8, 4
NAMES = {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200", "cuda:2": "NVIDIA L4", "cuda:3": "NVIDIA Unheard-of 9000"}


class Attention(nn.Module):
    """Its attention has other kernels on CUDA than on the CPU, its dropout another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, value: Tensor) -> Tensor:
        heads = self.into(value).unflatten(-1, (3, 4, WIDTH // 4)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(*heads, dropout_p=0.1).transpose(1, 2).flatten(-2)
        result: Tensor = value + self.drop(self.out(mixed))
        return result


def model() -> nn.Module:
    return nn.Sequential(*(Attention() for _ in range(4)))


def batch() -> Tensor:
    return torch.zeros(ROWS, 16, WIDTH)


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAMES[str(device)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((80 - 2 * device.index) * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: device.index * 2**29)


def planned(*devices: str, measure: bool = True, **choices: Any) -> Plan:
    found, own = trace(made := model(), Sample(batch())), tuple(map(torch.device, devices))
    options = Options(own, CHUNKS, schedule="gpipe", rng="counter", measure=measure, **choices)
    return make_plan(made, found, options, sizes=(ROWS // CHUNKS,) * CHUNKS)


def figures(found: Plan) -> list[tuple[float, float, int, int]]:
    return [(s.forward_s, s.backward_s, s.memory.peak_bytes, len(s.nodes)) for s in found.stages]


def test_cards_that_are_there_cost_what_they_cost_on_paper() -> None:
    asked = {"chunks": CHUNKS, "schedule": "gpipe", "recompute": "never"}
    paper = plan(model(), "2xH200-SXM-141GB", sample=batch(), **asked)
    found = planned("cuda:0", "cuda:1")
    assert figures(found) == figures(paper)
    assert (found.step_s, found.bottleneck_s) == (paper.step_s, paper.bottleneck_s)


@pytest.mark.slow
def test_a_model_on_the_cpu_is_not_measured_for_cards() -> None:
    found = planned("cuda:0", "cuda:1")
    assert not found.measured
    assert any("times are those of H200-SXM-141GB by its data sheet" in note for note in found.notes)
    assert not any("data sheet" in note for note in planned("cuda:0", "cuda:1", measure=False).notes)
    lanes = planned("cpu", "cpu")
    assert lanes.measured
    assert not any("data sheet" in note for note in lanes.notes)


def test_times_of_one_card_are_not_taken_for_anothers() -> None:
    def lies(place: str, lead: str) -> bool:
        return _lies_on(torch.device(lead), nn.Module(), [SimpleNamespace(device=torch.device(place))])  # type: ignore[list-item]

    assert lies("cuda:1", "cuda:0"), "two of a kind"
    assert not lies("cuda:2", "cuda:0"), "an L4's times are not an H200's"
    assert not lies("cpu", "cuda:0")
    assert not lies("meta", "cpu")
    assert lies("cpu", "cpu")


def test_a_link_is_that_of_the_cards_which_the_driver_names_and_the_slowest_of_a_row_counts() -> None:
    def seconds(*devices: str) -> float:
        return link_seconds(Options(tuple(map(torch.device, devices)), chunks=2), 2**30)

    assert seconds("cuda:0", "cuda:1") == registry.link(*("H200-SXM-141GB",) * 2).transfer_s(2**30)
    assert seconds("cpu", "cuda:0") == registry.link("cpu-lane", "H200-SXM-141GB").transfer_s(2**30)
    assert seconds("cpu", "cpu") == 0.0
    row = seconds("cuda:0", "cuda:1", "cuda:3", "cuda:3")
    assert row == seconds("cuda:1", "cuda:3") > seconds("cuda:0", "cuda:1")


def test_devices_of_several_kinds_have_their_speeds() -> None:
    names = ("cuda:0", "cuda:2")
    work = {name: sum(s.forward_s + s.backward_s for s in planned(name).stages) for name in names}
    for devices in (names, names[::-1]):
        fast, slow = sorted(planned(*devices).stages, key=lambda stage: work[stage.device])
        assert len(fast.nodes) > len(slow.nodes), "the faster card has more of the work"


def test_a_cpu_among_cards_is_the_last_resort() -> None:
    found = planned("cpu", "cuda:0", measure=False)
    assert found.devices == ("cuda:0",)
    assert "cpu stays idle: a CPU is the last resort, and the other devices have room for all" in found.notes
    peak = found.stages[0].memory.peak_bytes
    for part in (1.0, 0.98, 0.96, 0.9, 0.5):
        limit = int(part * peak)
        both = planned("cpu", "cuda:0", measure=False, memory_limit=(None, limit))
        assert limit < peak or "cpu" not in both.devices
        assert part > 0.5 or "cpu" in both.devices
        assert all(stage.memory.peak_bytes <= limit for stage in both.stages if stage.device == "cuda:0")


def test_what_others_hold_of_a_card_is_no_room() -> None:
    stages = planned("cuda:0", "cuda:1").stages
    assert [stage.memory.capacity_bytes for stage in stages] == [80 * 2**30, 80 * 2**30 - 3 * 2**29]


def test_what_a_card_lacks_is_converted_there() -> None:
    paper, there = registry.device("A100-SXM4-80GB"), spec_of("NVIDIA A100-SXM4-80GB")
    assert there.name == paper.name
    assert "fp8" not in paper.dtypes
    assert there.peak("fp8") == paper.peak("fp32")
    assert there.peak("bf16") == paper.peak("bf16")
    assert spec_of("NVIDIA Unheard-of 9000").name == "A100-PCIe-80GB"


def test_a_plan_that_the_host_binds_advises_fewer_kernels() -> None:
    found = planned("cuda:0", "cuda:1")
    slow = [stage.model_copy(update={"forward_issue_s": 1.0, "backward_issue_s": 1.0}) for stage in found.stages]
    said = next(
        why for why in reasons(found.model_copy(update={"stages": tuple(slow)})) if why.startswith("host-bound")
    )
    assert said.endswith("fewer chunks mean fewer kernels, and compile=True fuses them")
