"""What two plans differ in, and what other tools are told of one."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from autosplit import InputError, PlanError
from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Unit
from autosplit.planning.plan.write import check_plan
from tests.models.blocks import WideBlock
from tests.planning.test_plan_file import a_plan, plans

WIDTH, TOKENS, ROWS = 8, 16, 8


class Language(nn.Module):
    """Named as torchtitan's models are."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(WideBlock(WIDTH, norm=True, times=2) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.tok_embeddings(tokens)
        for layer in self.layers:
            value = layer(value)
        return self.output(self.norm(value))


def planned(model: nn.Module, *, devices: int = 2, **options: Any) -> Plan:
    torch.manual_seed(0)
    own = Options((torch.device("cpu"),) * devices, 4, measure=False, **options)
    pipe = PipelinedModule(model, own)
    pipe(torch.randint(0, TOKENS, (ROWS, 5)))
    assert pipe.plan is not None
    return pipe.plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of blocks that are whole."""
    return planned(Language(), cut=stages_of([3, 3]))


def stages_of(counts: list[int], prefix: str = "") -> dict[str, int]:
    """Return the stage of every module where stages have so many blocks."""
    blocks = [stage for stage, count in enumerate(counts) for _ in range(count)]
    cut = {f"{prefix}layers.{number}": stage for number, stage in enumerate(blocks)}
    return {f"{prefix}tok_embeddings": 0, f"{prefix}norm": len(counts) - 1, f"{prefix}output": len(counts) - 1} | cut


# -- differences -----------------------------------------------------------------------------------------------------
@settings(max_examples=20)
@given(before=plans(), after=plans())
def test_plans_differ_exactly_where_they_are_not_equal(before: Plan, after: Plan) -> None:
    assert not before.diff(before)
    assert str(before.diff(copy.deepcopy(before))) == "the plans are equal"
    assert bool(before.diff(after)) == (before != after)
    json.dumps(asdict(before.diff(after)))
    assert str(before.diff(after))


def test_every_field_that_is_edited_is_told() -> None:
    before = Plan.model_validate(a_plan())
    edits = {
        "chunks": 3,
        "notes": ("x",),
        "step_s": 2.0,
        "optimizer": "sgd",
        "rung": "module tree",
        "devices": ("cpu", "cuda:0"),
        "class_flops": {"micro": 0.5},
        "measured": False,
        "objective": "step_time",
        "lower_bound_s": 0.1,
        "machine": "m",
    }
    for name, value in edits.items():
        text = str(before.diff(before.model_copy(update={name: value})))
        assert name in text, name


# -- another model's plan --------------------------------------------------------------------------------------------
def test_a_plan_of_another_model_is_refused_with_the_entries(plan: Plan) -> None:
    check_plan(plan, Language(), devices=2)
    check_plan(plan, Language().double(), devices=2)
    other = Language()
    other.output = nn.Linear(WIDTH, TOKENS + 1)
    with pytest.raises(
        PlanError,
        match=r"made for Language with other parameters or buffers than this Language has: output\.bias is \[17\], in "
        r"the plan \[16\]; output\.weight is \[17, 8\], in the plan \[16, 8\]; plan again",
    ):
        check_plan(plan, other, devices=2)
    with pytest.raises(
        PlanError, match=r"layers\.6\.narrow\.bias\[8\] is not in the plan; .*; 2 more differ; plan again"
    ):
        check_plan(plan, Language(7), devices=2)
    old = plan.model_copy(update={"fingerprint": plan.fingerprint.model_copy(update={"entries": ()})})
    with pytest.raises(PlanError, match=r"than this Language has \(47 entries\); plan again"):
        check_plan(old, Language(7), devices=2)


# -- torchtitan ------------------------------------------------------------------------------------------------------
def test_torchtitan_gets_whole_modules_in_order(plan: Plan) -> None:
    assert json.loads(plan.export("torchtitan")) == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "norm", "output"],
    ]


def test_an_edited_cut_is_exported_and_not_that_of_its_units(plan: Plan) -> None:
    costs = dict.fromkeys(("weight_s", "static_bytes", "kept_bytes", "transient_bytes", "sent_bytes"), 0)
    unit = Unit(name="layers.2.wide", stage=0, forward_s=1e-3, backward_s=0, **costs)
    moved = plan.model_copy(update={"units": (unit,)}).move({"layers.2": 1})
    assert json.loads(moved.export("torchtitan"))[1][0] == "layers.2"


# -- Megatron --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([3, 3], "Ettt|tttL"),
        ([1, 2, 2, 1], "Et|tt|tt|tL"),
        ([2, 1, 1, 1, 1, 1, 2], "Ett|t|t|t|t|t|ttL"),
        ([3, 4, 4, 4, 1], "Ettt|tttt|tttt|tttt|tL"),
        ([0, 3, 3, 0], "E|ttt|ttt|L"),
        ([6], "EttttttL"),
    ],
)
def test_megatron_gets_its_layout(counts: list[int], text: str, plan: Plan) -> None:
    blocks = iter(range(sum(counts)))
    names = [[f"layers.{next(blocks)}.wide#0" for _ in range(count)] for count in counts]
    names[0].insert(0, "tok_embeddings#0")
    names[-1].append("output#0")
    stages = tuple(
        plan.stages[0].model_copy(update={"index": index, "lane": index, "nodes": tuple(own)})
        for index, own in enumerate(names)
    )
    made = plan.model_copy(update={"stages": stages, "devices": ("cpu",) * len(counts)})
    assert made.export("megatron") == text + "\n"


def test_a_model_without_one_list_of_blocks_has_no_layout() -> None:
    plan = Plan.model_validate(a_plan())
    with pytest.raises(
        InputError, match=r"one list of blocks, and the model has 0 \(none\); use export\('torchtitan'\)"
    ):
        plan.export("megatron")
