"""A plan edited by hand, by its methods or in its file: checked on the model, costed anew, or refused with the node."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autosplit import PlanError, autosplit
from autosplit import plan as plan_on_paper
from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import predicted
from tests.equivalence.equality import TOLERANCE, difference
from tests.planning.test_plan_diff import TOKENS, Language

TOKENS_IN = torch.arange(40).reshape(8, 5) % TOKENS
MACHINE = "2xL4-24GB"


def on_paper(**choices: Any) -> Plan:
    return plan_on_paper(Language(), MACHINE, 4, sample=TOKENS_IN, **choices)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return on_paper(optimizer="sgd", precision="bf16", recompute="never", schedule="1f1b")


def stage_of(plan: Plan, module: str) -> set[int]:
    return {stage for node, stage in plan.stage_of().items() if node.startswith((f"{module}#", f"{module}."))}


def ends(plan: Plan) -> tuple[str, str]:
    """Return the last block of stage 0 and the first of stage 1 that can move as they are."""
    own = [number for number in range(6) if stage_of(plan, f"layers.{number}") == {0}]
    return f"layers.{own[-1]}", f"layers.{own[-1] + 1}"


def test_a_moved_module_is_costed_on_the_model(plan: Plan) -> None:
    _, first = ends(plan)
    edited = plan.move({first: 0})
    assert edited.edited
    assert not plan.edited
    assert edited.step_s == plan.step_s
    found = on_paper(plan=edited)
    assert not found.edited
    assert stage_of(found, first) == {0}
    assert (found.optimizer, found.precision, found.machine) == ("sgd", "bf16", MACHINE)
    for before, after, sign in zip(plan.stages, found.stages, (1, -1), strict=True):
        assert (after.forward_s - before.forward_s) * sign > 0
        assert (after.memory.parameter_bytes - before.memory.parameter_bytes) * sign > 0
    assert found.step_s >= predicted(found).step_s > 0
    assert {unit.stage for unit in found.units} == {0, 1}
    assert found == on_paper(plan=edited)
    moved = {entry.name.partition("#")[0] for entry in plan.diff(found).moved}
    assert all(name.startswith(first) for name in moved)


def test_a_plan_as_it_is_costs_what_it_did(plan: Plan) -> None:
    found = on_paper(plan=plan)
    for before, after in zip(plan.stages, found.stages, strict=True):
        assert after.nodes == before.nodes
        assert after.memory == before.memory
        assert after.forward_s == pytest.approx(before.forward_s)
    assert found.step_s == pytest.approx(plan.step_s)
    assert found.boundaries == plan.boundaries


@pytest.mark.slow
def test_the_same_cut_with_another_optimizer_or_precision(plan: Plan) -> None:
    found = on_paper(plan=plan, optimizer="adam", precision="fp32")
    assert found.stage_of() == plan.stage_of()
    assert (found.optimizer, found.precision) == ("adam", "fp32")
    assert found.stages[0].memory.optimizer_bytes > 0
    assert found.stages[0].memory.parameter_bytes == 2 * plan.stages[0].memory.parameter_bytes


def test_a_pipe_runs_an_edited_plan(plan: Plan) -> None:
    _, first = ends(plan)
    torch.manual_seed(0)
    model = Language().double()
    twin = copy.deepcopy(model)
    pipe = autosplit(model, devices=["cpu", "cpu"], sample=TOKENS_IN, plan=plan.move({first: 0}))
    assert pipe.plan is not None
    assert not pipe.plan.edited
    assert pipe.plan.optimizer == "sgd"
    assert stage_of(pipe.plan, first) == {0}
    target = torch.arange(40).reshape(8, 5) * 3 % TOKENS

    def loss(output: Tensor, goal: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), goal.flatten())

    found, expected = pipe.train_step(TOKENS_IN, target=target, loss_fn=loss), loss(twin(TOKENS_IN), target)
    expected.backward()
    assert difference(found, expected.detach()) <= TOLERANCE[torch.float64]
    for own, other in zip(pipe.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert difference(own.grad, other.grad) <= TOLERANCE[torch.float64]


def test_an_edit_of_the_file_is_an_edit(plan: Plan, tmp_path: Path) -> None:
    path, (last, _) = tmp_path / "plan.json", ends(plan)
    fields = json.loads(plan.to_json())
    one, other = (stage["nodes"] for stage in fields["stages"])
    moved = [node for node in one if node.startswith((f"{last}#", f"{last}."))]
    fields["stages"][0]["nodes"] = [node for node in one if node not in moved]
    fields["stages"][1]["nodes"] = moved + other
    fields["stages"][1]["recompute"] = "block"
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert Plan.load(path).edited
    found = plan_on_paper(Language(), sample=TOKENS_IN, plan=path)
    assert stage_of(found, last) == {1}
    assert [stage.recompute for stage in found.stages] == ["never", "block"]
    found.save(path)
    assert Plan.load(path) == found
    assert not Plan.load(path).edited


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (
            {"output": 0},
            r"'output#0' cannot run in stage 0: it takes 'norm#0' of stage 1; move that too, or plan again",
        ),
        (
            {"layers.5.narrow": 0},
            r"'layers\.5\.narrow#0' cannot run in stage 0: it takes 'layers\.5#0/gelu_0' of stage 1",
        ),
        ({"layers.0": 1}, r"'layers\.1\.norm#0' cannot run in stage 0: it takes 'layers\.0#0/add_0' of stage 1"),
    ],
)
def test_what_data_does_not_allow(plan: Plan, moves: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        on_paper(plan=plan.move(moves))
    with pytest.raises(PlanError, match=message):
        autosplit(Language(), devices=["cpu", "cpu"], sample=TOKENS_IN, plan=plan.move(moves))


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({"layer.5": 0}, r"no module or node 'layer\.5'; the nearest: .*layers\.5"),
        ({"zzz": 0}, r"no module or node 'zzz'$"),
        ({"layers.5": 2}, r"'layers\.5' cannot go to stage 2: there are 2, 0 on"),
        ({"layers.5": -1}, r"cannot go to stage -1"),
        ({"tok_embeddings": 1, "layers": 1}, r"stage 0 would have nothing left"),
    ],
)
def test_moves_that_cannot_be(plan: Plan, moves: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.move(moves)


def test_a_plan_for_other_devices_or_another_model(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"the plan has 2 lanes, devices names 3; give one device per lane"):
        plan_on_paper(Language(), "3xL4-24GB", sample=TOKENS_IN, plan=plan)
    with pytest.raises(PlanError, match=r"layers\.6\.narrow\.bias\[8\] is not in the plan"):
        plan_on_paper(Language(7), MACHINE, sample=TOKENS_IN, plan=plan)
    with pytest.raises(PlanError, match=r"the plan has chunks=4, chunks=2 was given"):
        plan_on_paper(Language(), MACHINE, 2, sample=TOKENS_IN, plan=plan)
