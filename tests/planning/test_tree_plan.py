"""The plan of a model that runs by its own Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import InfeasibleError
from autosplit.options import Sample
from autosplit.planning.plan.plan import Plan
from autosplit.planning.tree import plan_tree
from tests.models.own_python import CASES, WIDTH, Detector, EarlyExit, PerRow, Tied, options, rows


def plan_of(model: nn.Module, *args: Any, stages: int = 3, **more: Any) -> Plan:
    return plan_tree(model, Sample(*args), options(stages, **more), reason="it exits early")


class Sized(nn.Module):
    """Layers of given widths in a row, with a value read."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e30:
                break
        return x


def test_stages_are_contiguous_and_complete(tmp_path: Path) -> None:
    model = EarlyExit().double()
    plan = plan_of(model, *rows(8, 0))
    names = [name for stage in plan.stages for name in stage.nodes]
    paths = dict(model.named_modules())
    assert len(plan.stages) == 3
    assert all(stage.nodes for stage in plan.stages)
    assert all(name.endswith("#0") and name[:-2] in paths for name in names)
    assert names[0] == "embed#0"
    assert sum(stage.parameters for stage in plan.stages) == sum(p.numel() for p in model.parameters())
    assert plan.rung == "module tree"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.notes[0].startswith("no graph can follow this model (it exits early): its own Python runs")


def test_costs_decide_the_cut() -> None:
    plan = plan_of(Sized(8, 8, 8, 512, 512, 8, 8), torch.randn(4, 8), stages=2)
    first, second = (list(stage.nodes) for stage in plan.stages)
    assert "layers.2#0" in first
    assert first[-1] in ("layers.2#0", "layers.3#0")
    assert second[0] in ("layers.3#0", "layers.4#0")
    assert plan.bottleneck_s < sum(s.forward_s + s.backward_s for s in plan.stages)
    assert plan.status == "optimal"


def test_it_is_one_chunk() -> None:
    plan = plan_of(PerRow().double(), *rows(10, 0))
    assert plan.microbatch_rows == (10,)
    assert "one chunk: the stages run one after the other" in plan.notes
    assert plan.class_flops == {"shared": 0.0, "micro": 0.0, "full": 1.0}
    assert plan.bubble == pytest.approx(1 - 1 / 3)
    assert plan.step_s == pytest.approx(sum(stage.forward_s + stage.backward_s for stage in plan.stages))


def test_a_list_of_images_is_one_chunk_of_its_length() -> None:
    case = CASES["detector"]
    plan = plan_of(Detector().double(), *case.batch(5, 0))
    assert plan.microbatch_rows == (5,)


def test_a_tie_is_a_boundary_with_one_home() -> None:
    model = Tied().double()
    plan = plan_of(model, *rows(8, 0))
    [tie] = [boundary for boundary in plan.boundaries if boundary.per_step]
    assert (tie.value, tie.producer, tie.consumers) == ("embed.weight", 0, (2,))
    assert tie.bytes == WIDTH * WIDTH * 8
    cuts = [boundary for boundary in plan.boundaries if not boundary.per_step]
    assert [(c.producer, c.consumers) for c in cuts] == [(0, (1,)), (1, (2,))]


def test_state_counts_once_with_gradients_and_optimizer() -> None:
    model = Tied().double()
    plan = plan_of(model, *rows(8, 0))
    size = sum(p.numel() * 8 for p in model.parameters())
    assert sum(stage.memory.parameter_bytes for stage in plan.stages) == size
    assert sum(stage.memory.gradient_bytes for stage in plan.stages) == size
    assert sum(stage.memory.optimizer_bytes for stage in plan.stages) == 2 * size
    assert all(stage.memory.peak_bytes >= stage.memory.parameter_bytes for stage in plan.stages)
    assert sum(stage.memory.activation_bytes for stage in plan.stages) > 0


def test_a_limit_that_cannot_hold() -> None:
    model = EarlyExit().double()
    needed = max(stage.memory.peak_bytes for stage in plan_of(model, *rows(8, 0)).stages)
    assert plan_of(model, *rows(8, 0), memory_limit=2 * needed).fits is True
    with pytest.raises(InfeasibleError, match="bytes"):
        plan_of(model, *rows(8, 0), memory_limit=100)


def test_fewer_modules_than_devices() -> None:
    with pytest.warns(UserWarning, match="4 devices were given, but the model has only 2 modules"):
        plan = plan_of(Sized(4, 4, 4), torch.randn(4, 4), stages=4)
    assert [stage.nodes for stage in plan.stages] == [("layers.0#0",), ("layers.1#0",)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_made_without_gradients_estimates_the_backward(mode: Callable[[], Any]) -> None:
    model = PerRow().double()
    with mode():
        plan = plan_of(model, *rows(8, 0))
    assert all(stage.backward_s == pytest.approx(2 * stage.forward_s) for stage in plan.stages)


def test_a_model_on_meta_is_planned_without_running_where_it_cannot() -> None:
    model = copy.deepcopy(Sized(4, 8, 8, 4)).to("meta")
    plan = plan_of(model, torch.randn(4, 4, device="meta"), stages=3)
    assert [len(stage.nodes) for stage in plan.stages] == [1, 1, 1]
    assert not plan.measured
    assert all(p.is_meta for p in model.parameters())
