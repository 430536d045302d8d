"""What lies on the host, on paper: the optimizer's state, and what blocks save between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import InputError, Plan, PlanError, autosplit, plan
from autosplit.planning.plan.fields import MeshDegrees
from autosplit.schedule.memory.offload import offloaded
from autosplit.schedule.memory.pieces import NodeStep, StageTrace, TracePieces
from cost_models.registry import device

ROWS, WIDTH, INNER, BLOCKS = 16384, 1024, 2048, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(value).sigmoid())
        return result


def _planned(devices: str = "1xA100-PCIe-80GB", **choices: Any) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    sample = torch.empty(choices.pop("rows", ROWS), WIDTH, device="meta")
    return plan(model, devices, sample=sample, **{"chunks": 1, "schedule": "1f1b", "precision": "bf16", **choices})


def test_nothing_of_a_block_stays_but_beside_the_next_one() -> None:
    """By hand: blocks of 10 bytes, 1 and 100 in front of and behind them; a skip from block 0 to 2 stays."""
    names = ("in", "a", "b", "c", "out")
    sizes = {1: 1, 2: 10, 3: 10, 4: 10, 5: 100}
    forward = [NodeStep(name, ((storage, sizes[storage]),)) for name, storage in zip(names, sizes, strict=True)]
    forward[1] = NodeStep("a", ((2, 10), (6, 7)))
    backward = [NodeStep(name, ((s, -sizes[s]),)) for name, s in reversed([*zip(names, sizes, strict=True)])]
    backward[1] = NodeStep("c", ((4, -10), (6, -7)))
    own = offloaded(StageTrace(tuple(forward), tuple(backward), tuple(backward)), {"a": 0, "b": 1, "c": 2})
    pieces = TracePieces(own)
    there, back = pieces.piece("F", first=True), pieces.piece("B", first=True)
    assert there.left == {"activations": 1 + 7 + 100}
    assert there.peak_bytes == 1 + 7 + 2 * 10 + 100  # the last two blocks, before what is behind them ends
    assert [change for step in own.backward for change in step.changes] == [
        *((4, 10), (3, 10)),
        *((5, -100), (4, -10), (6, -7)),
        *((2, 10), (3, -10), (2, -10), (1, -1)),
    ]
    assert sum(back.left.values()) == -there.left["activations"]


def test_activations_on_the_host_take_the_link_and_two_blocks() -> None:
    """A block saves what its products take, of the first the model's input is none: INNER + WIDTH values of a row."""
    here, hosted = (_planned(optimizer="none", recompute="auto", **own) for own in ({}, {"offload": "activations"}))
    saved = ROWS * (INNER + WIDTH) * 2
    [before, after] = (found.stages[0].memory for found in (here, hosted))
    assert before.peak_bytes - after.peak_bytes == pytest.approx((BLOCKS - 2) * saved, rel=0.15)
    copies_s = device("A100-PCIe-80GB").host_link.transfer_s(BLOCKS * saved - ROWS * WIDTH * 2)
    assert copies_s > here.stages[0].forward_s
    assert hosted.stages[0].forward_s == pytest.approx(copies_s, rel=0.03)
    assert any("copy 736 MiB of each microbatch to the hosts and back" in note for note in hosted.notes)
    assert Plan.model_validate_json(hosted.to_json()).offload == ("activations",)
    with pytest.warns(UserWarning, match="does not say that activations lie on the host"):
        hosted.export("megatron-args")
    again = _planned(plan=hosted, chunks=1, schedule="auto")
    assert again.stages[0].memory == hosted.stages[0].memory


def test_a_pipeline_holds_no_microbatches_in_flight() -> None:
    asked: dict[str, Any] = {"devices": "4xA100-PCIe-80GB", "chunks": 8, "rows": 8 * ROWS, "optimizer": "none"}
    here, hosted = (_planned(**asked, **own).stages[0].memory for own in ({}, {"offload": "activations"}))
    assert hosted.activation_bytes < here.activation_bytes / 4


def test_the_optimizer_on_the_host_is_one_idea() -> None:
    own, named = _planned(offload="optimizer"), _planned(optimizer="cpu_adamw")
    assert own.offload == named.offload == ("optimizer",)
    assert (own.step_s, own.stages[0].memory) == (named.step_s, named.stages[0].memory)
    both = _planned(offload="optimizer,activations")
    assert both.offload == ("activations", "optimizer")
    assert both.stages[0].memory.peak_bytes < own.stages[0].memory.peak_bytes


def test_what_cannot_lie_on_the_host() -> None:
    for text, wrong in {
        "offload='weights' is not available": {"offload": "weights"},
        "leave optimizer='sgd' or offload= out": {"offload": "optimizer", "optimizer": "sgd"},
        r"leave recompute=\('block',\)": {"offload": "activations", "recompute": "block"},
        "schedule='forward' out": {"offload": "activations", "schedule": "forward"},
    }.items():
        with pytest.raises(InputError, match=text):
            _planned(**wrong)
    with pytest.raises(InputError, match="what repeated blocks save, and the model has none"):
        plan(nn.Linear(8, 8), "1xL4-24GB", sample=torch.zeros(8, 8), offload="activations")
    with pytest.raises(InputError, match="what a CPU has there already"):
        _planned("cpu", offload="optimizer")


def test_a_backward_under_autocast_sums_gradients_of_its_blocks_last() -> None:
    here, hosted = (_planned(precision="amp_bf16", chunks=2, **own) for own in ({}, {"offload": "activations"}))
    assert hosted.stages[0].memory.peak_bytes < here.stages[0].memory.peak_bytes


def test_no_pipe_follows_what_is_planned_on_paper_alone() -> None:
    model, followed = nn.Sequential(*[Block() for _ in range(BLOCKS)]), _planned(offload="optimizer", rows=8)
    shared = followed.model_copy(update={"offload": (), "mesh": MeshDegrees(dp=1, tp=1, pp=1, cp=2)})
    for each in (followed, shared):
        with pytest.raises(PlanError, match=r"(optimizer on the host|cp=2), on paper alone"):
            autosplit(model, devices=1, plan=each)


def test_fp8_is_of_a_mesh_of_devices_that_have_it() -> None:
    for devices, wrong in (("1xH100-SXM5-80GB", "ranks of a mesh"), ("1xA100-PCIe-80GB", "no such arithmetic")):
        with pytest.raises(InputError, match=wrong):
            _planned(devices, precision="fp8")
