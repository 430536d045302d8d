"""Plans whose stages have replicas: step and memory against the same counted otherwise, auto, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from operator import truediv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import Plan, plan
from autosplit.checks import resolve_machine
from autosplit.errors import InputError, PlanError, ScheduleError
from autosplit.parallel import largest_bucket
from autosplit.planning.timeline import predicted
from autosplit.report.sections import render
from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import TransferTime, simulate
from cost_models.collectives import group_of

H100 = "H100-SXM5-80GB"
ROWS = 4096


class Uneven(nn.Module):
    """A model whose middle, which cannot be cut, takes about as long as all around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
        self.middle = nn.Linear(512, 4096)
        self.last = nn.Linear(4096, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(self.first(x))))


class Mixing(Uneven):
    """One that mixes the rows of a batch at its end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out @ out.T


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Uneven()


def planned(model: nn.Module, devices: int = 4, *, rows: int = ROWS, chunks: int | str = 8, **asked: Any) -> Plan:
    return plan(model, f"{devices}x{H100}", chunks, sample=torch.empty(rows, 512, device="meta"), **asked)


@pytest.mark.parametrize("replicas", [(2, 2), (1, 2, 1), (3, 1), (4,)])
def test_the_step_is_that_of_its_stages_and_the_sum_of_their_gradients(
    model: nn.Module, replicas: tuple[int, ...]
) -> None:
    found = planned(model, replicas=list(replicas))
    lanes = [stage.lane for stage in found.stages]
    assert (found.replicas, len(found.devices)) == (replicas, 4)
    assert [b - a for a, b in pairwise([*lanes, 4])] == list(replicas)
    schedule = build("1f1b", stages=len(replicas), microbatches=8, replicas=replicas)
    assert found.schedule_for(8) == schedule
    timeline = simulate(
        schedule,
        forward_s=[stage.forward_s for stage in found.stages],
        backward_s=[stage.backward_s for stage in found.stages],
        transfers=[TransferTime(**dict(own)) for own in found.transfers],
    )
    machine, done_s = resolve_machine(f"4x{H100}"), []
    for stage in found.stages:
        group = group_of(machine, range(stage.lane, stage.lane + stage.replicas))
        end_s = max(span.end_s for span in timeline.spans if span.action.stage == stage.index)
        done_s.append(end_s + group.seconds("all_reduce", stage.memory.parameter_bytes))
    assert found.step_s == pytest.approx(max(done_s), rel=1e-9)
    assert found.update_s == pytest.approx(max(done_s) - timeline.step_s, abs=1e-12)
    loads_s = [stage.forward_s + stage.backward_s for stage in found.stages]
    for sent in found.transfers:
        for stage in (sent.producer, sent.consumer):
            loads_s[stage] += sent.forward_s + sent.backward_s
    assert found.bottleneck_s == pytest.approx(max(map(truediv, loads_s, replicas)), rel=1e-9)
    assert {bar.lane for bar in predicted(found).bars} == set(range(4))
    assert 0 < found.lower_bound_s <= found.step_s


def test_a_replica_holds_what_one_device_with_its_microbatches_would(model: nn.Module) -> None:
    alone = planned(model, 1, rows=ROWS // 4, chunks=2, schedule="1f1b").stages[0].memory
    replica = planned(model, replicas=[4]).stages[0].memory
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    same = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    assert [getattr(replica, name) for name in same] == [getattr(alone, name) for name in same]
    assert alone.peak_bytes <= replica.peak_bytes <= alone.peak_bytes + largest_bucket(sizes)


def test_a_saved_plan_says_all_of_it(model: nn.Module, tmp_path: Path) -> None:
    found = planned(model, replicas=[1, 2, 1])
    found.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == found
    assert planned(model, plan=again).step_s == found.step_s
    assert "replicas" in render(found)
    straight = planned(model, 3, schedule="1f1b")
    assert "replicas" in str(straight.diff(found))
    with pytest.raises(InputError, match=r"\[1, 2, 1\] replicas, which no export can say"):
        found.export("torch-csv")
    with pytest.raises(InputError, match="leave processes= out"):
        planned(model, plan=again, processes=True)
    wrong = (tmp_path / "plan.json").read_text(encoding="utf-8").replace('"replicas": 2', '"replicas": 3')
    (tmp_path / "wrong.json").write_text(wrong, encoding="utf-8")
    with pytest.raises(PlanError, match="has its stages on lanes"):
        Plan.load(tmp_path / "wrong.json")


def test_auto_is_the_fastest_of_all_replicas(model: nn.Module) -> None:
    best = planned(model, 3, replicas="auto")
    every = [planned(model, 3, replicas=own) for own in ([3], [2, 1], [1, 2], [1, 1, 1])]
    assert best.step_s == min(own.step_s for own in every)


def test_what_mixes_rows_is_on_one_device() -> None:
    with pytest.raises(InputError, match=r"replicas=\[1, 2\].*mixes the rows of a batch.*give that stage one replica"):
        planned(Mixing(), 3, replicas=[1, 2])
    assert planned(Mixing(), 3, replicas="auto").stages[-1].replicas == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"replicas": [2, 1]}, r"replicas=\[2, 1\] are 3 devices in 2 stages, and devices names 4"),
        ({"replicas": [4, 0]}, r"replicas=\[4, 0\]: give how many devices each stage has"),
        ({"replicas": []}, r"replicas=\[\]: give how many"),
        ({"replicas": "many"}, "replicas='many': give how many"),
        ({"replicas": [2, 2], "virtual_stages": 2}, "and virtual_stages=: stages with replicas are planned anew"),
        ({"replicas": "auto", "schedule": "gpipe"}, "and schedule='gpipe'"),
        ({"replicas": [2, 2], "mesh": "auto"}, "and mesh="),
        ({"replicas": [2, 2], "processes": True}, "and processes="),
        ({"replicas": [2, 2], "find": "smallest"}, "and find="),
        ({"replicas": "auto", "recompute": ["never"] * 4}, "recompute=.* is for a number of stages"),
    ],
)
def test_what_replicas_do_not_go_with(model: nn.Module, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        planned(model, **asked)


def test_every_replica_has_a_microbatch_and_devices_of_a_stage_are_alike(model: nn.Module) -> None:
    with pytest.raises(ScheduleError, match=r"with 2 microbatches: .* at least 4 chunks and rows"):
        planned(model, replicas=[4], chunks=2)
    with pytest.raises(ScheduleError, match="the model has only 6 separable parts; give fewer stages"):
        planned(model, 9, rows=64, replicas=[2, *[1] * 7])
    sample = torch.empty(8, 512, device="meta")
    with pytest.raises(InputError, match="stage 1 has replicas on H100-SXM5-80GB and L4-24GB; give alike devices"):
        plan(model, f"2x{H100}+1xL4-24GB", 2, sample=sample, replicas=[1, 2])
    assert plan(model, f"2x{H100}+1xL4-24GB", 2, sample=sample, replicas=[2, 1]).replicas == (2, 1)
