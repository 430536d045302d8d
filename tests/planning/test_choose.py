"""The search over microbatches, schedules and recompute: what it takes, and what it does where nothing fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autosplit.api import plan
from autosplit.options import Options, Sample
from autosplit.planning.peaks import PeakRange
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.search.choose import PlanChoice, Search
from autosplit.planning.search.finish import Finished
from autosplit.planning.search.sweep import Space, Sweep
from autosplit.planning.timeline import predicted
from autosplit.trace.ladder import Trace, trace
from tests.models.blocks import wide_blocks

WIDTH, ROWS = 16, 64


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return wide_blocks(4, WIDTH)


@pytest.fixture(scope="module")
def found(model: nn.Module) -> Trace:
    return trace(model, Sample(torch.zeros(ROWS, WIDTH)))


def chosen(model: nn.Module, found: Trace, space: Space, *, limit: int | None = None, devices: int = 2) -> Plan:
    options = Options((torch.device("cpu"),) * devices, 8, memory_limit=limit, measure=False)
    return PlanChoice(Search(Sweep(RecordedModel(model, found), options, space, rows=ROWS))).plan


def peak(own: Plan) -> int:
    return max(stage.memory.peak_bytes for stage in own.stages)


def over(model: nn.Module, found: Trace, space: Space, *, limit: int | None = None) -> list[Plan]:
    return [
        chosen(model, found, Space((chunks,), (schedule,), space.recompute), limit=limit)
        for chunks in space.chunks
        for schedule in space.schedules
    ]


WIDE = Space((1, 2, 4, 8), (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)))


def test_of_all_entries_the_fastest_is_chosen(model: nn.Module, found: Trace) -> None:
    best = chosen(model, found, WIDE)
    assert best.step_s == pytest.approx(min(each.step_s for each in over(model, found, WIDE)), rel=0.02)
    assert best.chunks > 1


def test_under_a_limit_the_fastest_that_keeps_it_is_chosen(model: nn.Module, found: Trace) -> None:
    free = chosen(model, found, WIDE)
    limit = int(0.8 * peak(free))
    best = chosen(model, found, WIDE, limit=limit)
    assert best.fits
    assert peak(best) <= limit
    fitting = [each for each in over(model, found, WIDE, limit=limit) if each.fits]
    assert best.step_s == pytest.approx(min(each.step_s for each in fitting), rel=0.02)


@pytest.mark.slow
def test_where_nothing_fits_the_plan_that_comes_closest_says_no(model: nn.Module, found: Trace) -> None:
    none = chosen(model, found, WIDE, limit=1000)
    assert (none.verdict, none.fits) == ("no", False)
    assert peak(none) <= 1.02 * min(peak(each) for each in over(model, found, WIDE, limit=1000))


def test_devices_of_other_speeds_get_other_shares() -> None:
    with torch.device("meta"):
        deep, sample = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]), torch.zeros(16384, 2048)
    uneven = plan(deep, ["H100-SXM5-80GB", "V100-SXM2-16GB"], 4, sample=sample, schedule="1f1b")
    even = plan(deep, ["H100-SXM5-80GB"] * 2, 4, sample=sample, schedule="1f1b")
    first, last = ([unit.stage for unit in each.units].count(0) for each in (uneven, even))
    assert first > last
    assert uneven.step_s > even.step_s
    assert predicted(uneven).step_s == pytest.approx(uneven.step_s, rel=1e-6)


def test_the_same_input_gives_the_same_plan(model: nn.Module, found: Trace) -> None:
    assert chosen(model, found, WIDE) == chosen(model, found, WIDE)


def cut(step_s: float, low: int, peak: int, high: int) -> Finished:
    """Return a cut for one device of 100 bytes."""
    partition, ranges = SimpleNamespace(value_s=step_s), {0: PeakRange(low, high)}
    writer = SimpleNamespace(partition=partition, peaks=[peak], ranges=ranges)
    options = SimpleNamespace(capacity_bytes=lambda lane: 100, reserved_bytes=lambda lane: 0)
    entry, nothing = SimpleNamespace(options=options), cast(Any, None)
    return Finished(cast(Any, entry), nothing, cast(Any, writer), (100.0,))


def test_what_was_replayed_is_judged_by_its_range() -> None:
    ranges = ((80, 85, 100), (90, 95, 105), (96, 104, 106), (101, 104, 106))
    assert [cut(1.0, *own).verdict for own in ranges] == ["fits", "borderline", "borderline", "no"]


class Shifted(nn.Module):
    """Layers that all add one table, made anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.register_buffer("table", torch.zeros(2048, 256))

    def forward(self, value: Tensor) -> Tensor:
        shift = torch.sin(self.get_buffer("table"))
        for layer in self.layers:
            value = torch.relu(layer(value) + shift)
        return value


def test_others_cost_what_a_plan_of_them_costs_with_what_is_sent_once_per_step() -> None:
    with torch.device("meta"):
        model, x = Shifted(), torch.empty(32, 2048, 256)
    best = plan(model, "4xT4-16GB", 32, sample=x)
    others = [each for each in best.frontier if not each.replayed]
    assert {each.virtual_stages for each in others} == {1, 2}, "with two stages per device the table goes further"
    for each in others:
        own = plan(
            model,
            "4xT4-16GB",
            32,
            sample=x,
            schedule=each.schedule,
            virtual_stages=each.virtual_stages,
            recompute="never",
        )
        assert each.step_s == pytest.approx(own.step_s, rel=0.01)
    assert best.step_s == min(each.step_s for each in best.frontier)


def test_every_device_has_a_stage_where_some_schedule_gives_it_one() -> None:
    few = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    found = plan(few, "2xL4-24GB", sample=torch.zeros(8, WIDTH))
    assert {stage.lane for stage in found.stages} == {0, 1}
    with pytest.warns(UserWarning, match="using 2 stages on 1 device"):
        asked = plan(few, "2xL4-24GB", sample=torch.zeros(8, WIDTH), schedule="interleaved")
    assert asked.step_s < found.step_s, "for so small a model one device is faster, and that is not what was asked for"
