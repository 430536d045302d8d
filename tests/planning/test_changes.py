"""What is said to make a plan fit does: planned with those arguments, it fits, at the price that was named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, islice
from typing import Any

import pytest
import torch
from torch import nn

import autosplit
from autosplit.checks import resolve_machine
from autosplit.options import Options
from autosplit.planning.changes import _joined, _Kinds, _least, changes, tried
from autosplit.planning.choose import Space
from autosplit.planning.hardware import device_counts
from autosplit.planning.paper import stand_ins
from autosplit.planning.records import Change
from autosplit.planning.sketch import Sketch
from autosplit.planning.timeline import predicted
from tests.report.paper_plans import paper_plan

WIDTH, ROWS = 64, 32
H100 = "H100-SXM5-80GB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Eight blocks of 65 KiB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@cache
def planned(devices: str = f"2x{H100}", *, rows: int = ROWS, width_rows: int = 16, **choices: Any) -> autosplit.Plan:
    sample = torch.zeros(rows, width_rows, WIDTH)
    return autosplit.plan(Net(), devices, sample=sample, **{"schedule": "1f1b"} | choices)


def again(change: Change, **choices: Any) -> autosplit.Plan:
    """Plan as a change says."""
    arguments: dict[str, Any] = {**choices, **change.arguments}
    rows = arguments.pop("batch", ROWS)
    return planned(arguments.pop("devices", f"2x{H100}"), rows=rows, **arguments)


@pytest.mark.parametrize(
    ("choices", "kinds"),
    [
        ({"memory_limit": "1.2MiB", "chunks": 4}, {"devices", "optimizer", "precision"}),
        ({"memory_limit": "2.2MiB", "chunks": 2, "recompute": "never"}, {"recompute", "chunks", "batch", "devices"}),
    ],
)
def test_every_change_holds_when_it_is_planned(choices: dict[str, Any], kinds: set[str]) -> None:
    plan = planned(**choices)
    assert plan.verdict == "no"
    assert kinds <= {change.kind for change in plan.changes}, [change.text for change in plan.changes]
    assert len({change.kind for change in plan.changes}) == len(plan.changes)
    for change in plan.changes:
        found = again(change, **choices)
        assert found.verdict != "no", change.text
        if change.planned:
            assert change.verdict == found.verdict
            assert change.step_s == found.step_s
            assert change.peak_bytes == max(stage.memory.peak_bytes for stage in found.stages)
            assert "about" not in change.text
        else:
            assert "about" in change.text


def test_those_that_keep_the_numbers_come_first_and_those_that_train_otherwise_last() -> None:
    plan = planned(memory_limit="2.2MiB", chunks=2, recompute="never")
    order = ["recompute", "chunks", "schedule", "batch", "devices", "device", "optimizer", "precision"]
    groups = [0, 0, 0, 1, 2, 2, 3, 3]
    found = [groups[order.index(change.kind)] for change in plan.changes]
    assert found == sorted(found)


def test_a_plan_that_fits_needs_no_change() -> None:
    assert planned().changes == ()


def refused(**fields: Any) -> tuple[autosplit.Plan, Options]:
    """A plan by hand for four devices that have 9 GiB each, and what it was asked for."""
    plan = paper_plan(capacity_bytes=9 * 2**30).model_copy(update={"verdict": "no", "fits": False, **fields})
    machine = resolve_machine(f"4x{H100}")
    return plan, Options(devices=stand_ins(machine), chunks=8, machine=machine, measure=False, memory_limit=9 * 2**30)


def with_capacity(plan: autosplit.Plan, limit: int) -> autosplit.Plan:
    stages = tuple(
        stage.model_copy(update={"memory": stage.memory.model_copy(update={"capacity_bytes": limit})})
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


def test_without_a_way_to_plan_all_figures_are_estimates() -> None:
    plan, options = refused()
    found = changes(plan, options, Space(chunks=(8,), recompute=("never",)))
    assert found
    assert all(not change.planned and "about" in change.text for change in found)
    own = {change.kind: change for change in found}
    assert own["recompute"].arguments == {"recompute": "block"}
    assert own["recompute"].step_s > predicted(plan).step_s
    assert "longer" in own["recompute"].text


def test_what_does_not_fit_when_it_is_planned_is_left_out() -> None:
    plan, options = refused()
    space = Space(chunks=(8,), recompute=("never",))
    everything = changes(plan, options, space)
    asked: list[dict[str, str | int]] = []

    def replan(arguments: Any) -> autosplit.Plan:
        asked.append(dict(arguments))
        return plan

    found = changes(plan, options, space, replan=replan)
    assert asked == [change.arguments for change in everything[:3]]
    assert found == everything[3:]


def test_a_schedule_that_holds_less_is_proposed_for_one_that_was_asked_for() -> None:
    plan, options = refused(schedule="gpipe")
    space = Space(chunks=(8,), schedules=(("gpipe", 1),), recompute=("never",))
    [schedule] = [change for change in changes(plan, options, space) if change.kind == "schedule"]
    assert schedule.arguments == {"schedule": "1f1b"}
    assert schedule.text.startswith('schedule="1f1b": about ')


def test_nothing_is_proposed_that_was_left_open() -> None:
    plan, options = refused()
    kinds = {change.kind for change in changes(plan, options, Space(chunks=(2, 4, 8), recompute=None))}
    assert not kinds & {"recompute", "chunks", "schedule"}


def test_larger_devices_are_the_same_maker_s_and_only_where_no_limit_was_given() -> None:
    plan, options = refused()
    space = Space(chunks=(8,), recompute=("never",))
    assert "device" not in {change.kind for change in changes(plan, options, space)}
    small = resolve_machine("4xRTX3090-24GB")
    own = Options(devices=stand_ins(small), chunks=8, machine=small, measure=False)
    [device] = [change for change in changes(plan, own, space) if change.kind == "device"]
    assert str(device.arguments["devices"]).startswith("4x")
    assert "MI" not in str(device.arguments["devices"])


def test_where_no_change_is_enough_two_together_are() -> None:
    choices: dict[str, Any] = {"memory_limit": "0.3MiB", "chunks": 2, "recompute": "never"}
    plan = planned(f"8x{H100}", **choices)
    assert plan.verdict == "no"
    pairs = [change for change in plan.changes if change.kind == "pair"]
    assert pairs, [change.text for change in plan.changes]
    assert all(change.verdict != "fits" for change in plan.changes if change.kind != "pair")
    for change in pairs:
        assert len(change.arguments) == 2
        assert " and " in change.text
        if "precision" not in change.arguments:
            assert change.planned
            assert again(change, **choices, devices=f"8x{H100}").verdict != "no", change.text


@pytest.mark.parametrize("limit", [3 * 2**30, 4 * 2**30])
def test_pairs_are_the_least_that_fit_by_the_estimate(limit: int) -> None:
    plan, options = refused()
    options = replace(options, memory_limit=limit)
    plan = with_capacity(plan, limit)
    space = Space(chunks=(8,), recompute=("never",))
    listed = _Kinds(plan, options, space, Sketch(plan))
    kinds = [[own for own in islice(each, 64) if listed.possible(own)] for each in listed.all()]
    checked = 0
    for first, second in combinations([own for own in kinds if own], 2):
        if _joined(first[0], second[0]) is None:
            continue
        few, many = sorted((first, second), key=len)
        for own in few[:2]:
            row = [pair for pair in (_joined(own, other) for other in many) if pair is not None]
            for surely in (True, False):
                plain = next((pair for pair in row if listed.holds(pair, surely=surely)), None)
                found = _least(listed, row, surely=surely)
                assert found == plain
                checked += found is not None
    assert checked
    assert {change.kind for change in changes(plan, options, space)} == {"pair"}


def test_what_fits_quickly_fits_by_the_estimate_too() -> None:
    sketch = Sketch(refused()[0])
    for gibibytes in range(1, 24):
        setting = replace(sketch.setting(), capacity_bytes=gibibytes * 2**30)
        found = sketch.estimate(setting)
        assert sketch.holds(setting, surely=False) is (found is not None)
        assert sketch.holds(setting, surely=True) is (found is not None and found.verdict == "fits")


def test_where_nothing_helps_it_is_said_what_was_tried() -> None:
    plan, options = refused()
    plan = with_capacity(plan, 1000)
    options = replace(options, memory_limit=1000)
    space = Space(chunks=(8,), recompute=("never",))
    assert changes(plan, options, space) == ()
    words = tried(plan, options, space)
    assert words is not None
    assert words.startswith("nothing that was tried would make it fit, alone or two together, up to: recompute=")
    assert "optimizer=" in words
    assert f"x{H100}" in words
    small = planned(memory_limit="1KiB")
    assert small.verdict == "no"
    assert any(reason.startswith("nothing that was tried") for reason in small.reasons)
    assert small.changes == ()


@pytest.mark.parametrize(
    ("more_than", "per_host", "first"),
    [
        (0, None, ["1x", "2x", "3x"]),
        (6, None, ["7x", "8x", "2x8x"]),
        (8, None, ["2x8x", "3x8x", "4x8x"]),
        (16, None, ["3x8x", "4x8x", "5x8x"]),
        (3, 4, ["4x", "2x4x", "3x4x"]),
    ],
)
def test_devices_come_one_by_one_and_then_by_hosts(more_than: int, per_host: int | None, first: list[str]) -> None:
    found = device_counts(H100, more_than=more_than, per_host=per_host)
    listed = [next(found) for _ in range(3)]
    assert [text for _, text in listed] == [f"{count}{H100}" for count in first]
    assert [len(resolve_machine(text).devices) for _, text in listed] == [count for count, _ in listed]
