"""Unlike devices stand in the order with the shortest step; a pipe's lanes are in that order too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import InfeasibleError, InputError, Plan, Sample, autosplit, plan
from autosplit.checks import resolve_machine
from autosplit.options import Options
from autosplit.planning.paper import prepare, stand_ins
from autosplit.planning.search.choose import Search
from autosplit.planning.search.lineup import GAIN, lined_up
from autosplit.planning.search.sweep import Space

WIDTHS = (64, 256, 64, 64, 64, 128, 64)
LIMITS = (900, 220, 500)
SPECS = ("A100-PCIe-80GB", "L4-24GB", "T4-16GB")
ORDERS = list(itertools.permutations(range(3)))


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(WIDTHS)))


def planned(devices: Any, **choices: Any) -> Plan:
    asked: dict[str, Any] = {"schedule": "1f1b", "recompute": "never", "optimizer": "sgd", "reserve": None} | choices
    return plan(model(), devices, 4, sample=torch.zeros(16, 64), loss_fn=torch.sum, **asked)


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_gives_the_step_of_the_best(order: tuple[int, ...]) -> None:
    machine = resolve_machine([SPECS[i] for i in order])
    limits = tuple(LIMITS[i] * 2**10 for i in order)
    options = Options(stand_ins(machine), 4, memory_limit=limits, measure=False, machine=machine, optimizer="sgd")
    paper = prepare(model(), Sample(torch.zeros(16, 64)), options, loss_fn=torch.sum)
    sweep = paper.sweep(Space((4,)), rows=16)
    found = lined_up(sweep)
    every = [Search(replace(paper, options=paper.options.taking(each)).sweep(Space((4,)), rows=16)) for each in ORDERS]
    best_s = min(best.step_s for each in every if (best := each.fastest()) is not None)
    chosen = found.fastest()
    assert chosen is not None
    assert chosen.step_s <= best_s / (1 - GAIN)
    limits = found.sweep.options.memory_limit
    assert all(held <= limit for held, limit in zip(chosen.cut.device_bytes, limits, strict=True))


def test_the_order_is_the_callers_where_little_is_gained_and_where_it_is_asked_for() -> None:
    alike = planned("2xL4-24GB")
    assert not any("order" in note for note in alike.notes)
    asked = planned(["T4-16GB", "A100-PCIe-80GB"], recompute=["never", "block"])
    assert asked.devices == ("T4-16GB", "A100-PCIe-80GB")


@pytest.mark.parametrize("limits", [["20KiB", "1MiB"], "20KiB,1MiB", ["1MiB", "20KiB"]])
def test_limits_of_each_device_hold_and_numbers_are_the_plain_models(limits: Any) -> None:
    torch.manual_seed(1)
    sample, target = torch.randn(8, 64, dtype=torch.float64), torch.randn(8, 64, dtype=torch.float64)
    plain, split = model(torch.float64), model(torch.float64)
    widest = max(p.numel() for p in plain.parameters()) * 8
    limits = (
        [limit.replace("20", str(4 * widest // 2**10)) for limit in limits]
        if isinstance(limits, list)
        else (limits.replace("20", str(4 * widest // 2**10)))
    )
    pipe = autosplit(split, devices=2, chunks=4, sample=sample, memory_limit=limits, optimizer="sgd")
    capacities = [stage.memory.capacity_bytes for stage in pipe.plan.stages]
    assert sorted(capacities) == [4 * widest, 2**20]
    assert all(stage.memory.peak_bytes <= stage.memory.capacity_bytes for stage in pipe.plan.stages)
    pipe.train_step(sample, target=target, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(plain(sample), target).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(pipe.get_parameter(name).grad, parameter.grad, rtol=1e-12, atol=1e-12)


def test_errors_of_limits_name_the_numbers() -> None:
    with pytest.raises(InputError, match="memory_limit has 3 entries, and there are 2 devices; give one for each"):
        autosplit(model(), devices=2, memory_limit=[1, None, 2])
    with pytest.raises(InfeasibleError, match=r"its device has 4\.00 KiB"):
        autosplit(model(), devices=2, sample=torch.zeros(8, 64), memory_limit=["4KiB", "4KiB"])


def test_a_pipes_devices_are_in_the_order_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA L4"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[str(device)])
    options = Options(
        (torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")), 4, memory_limit=(1, 2, 3)
    )
    for asked in (("cuda:1", "cuda:0"), ("L4-24GB", "H200-SXM-141GB")):
        there = options.as_planned(asked)
        assert [str(device) for device in there.devices] == ["cuda:1", "cuda:0"]
        assert there.memory_limit == (2, 1)
    assert options.as_planned(("T4-16GB", "cpu")) is options


def test_a_plan_in_another_order_has_its_range_and_can_be_costed_again() -> None:
    for limits in (LIMITS, LIMITS[::-1]):
        found = planned(list(SPECS), memory_limit=[limit * 2**10 for limit in limits])
        assert found.step_low_s < found.step_s < found.step_high_s
        again = plan(model(), sample=torch.zeros(16, 64), loss_fn=torch.sum, plan=found, reserve=None)
        assert again.devices == found.devices
        assert again.step_s == pytest.approx(found.step_s, rel=1e-6)


@pytest.mark.parametrize("limits", [["24GiB", "12GiB"], ["12GiB", "12GiB"]])
def test_limits_of_alike_devices_are_no_hindrance_where_one_device_would_do(limits: list[str]) -> None:
    found = planned("2xT4", memory_limit=limits)
    assert found.verdict == "fits"
    assert any("holds the model with room" in reason for reason in found.reasons) == (limits[0] == limits[1])
