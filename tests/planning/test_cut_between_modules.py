"""cut="modules": cuts fall between blocks, inside one or behind a head only where that pays, or there are too few."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import Plan, plan
from autosplit.options import Options, Sample
from autosplit.planning.search.make import make_plan
from autosplit.trace.ladder import trace
from tests.models.blocks import WideBlock

WIDTH, ROWS, CHUNKS, FOUR = 256, 32, 8, "4xH100-SXM5-80GB"


class Net(nn.Module):
    def __init__(self, blocks: int, *, words: int = 64, wide: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(WideBlock(WIDTH, norm=True, times=wide) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), logits.detach().argmax(-1).flatten())


def planned(model: nn.Module, **choices: object) -> Plan:
    sample = torch.empty(ROWS, 512, WIDTH, device="meta")
    return plan(model.to("meta"), FOUR, CHUNKS, sample=sample, schedule="1f1b", **choices)


def split_blocks(found: Plan) -> set[str]:
    """Return the blocks that lie in more than one stage."""
    stages: dict[str, set[int]] = {}
    for stage in found.stages:
        for node in stage.nodes:
            if node.startswith("blocks."):
                stages.setdefault(".".join(node.split(".")[:2]).partition("#")[0], set()).add(stage.index)
    return {block for block, own in stages.items() if len(own) > 1}


def said(found: Plan) -> list[str]:
    return [note for note in found.notes if "inside modules" in note]


def test_cuts_fall_between_blocks_where_these_are_many() -> None:
    found, anywhere = planned(Net(61)), planned(Net(61), cut="operations")
    assert not split_blocks(found)
    assert not said(found) + said(anywhere)
    assert split_blocks(anywhere)
    hidden = max(boundary.bytes for boundary in found.boundaries if boundary.producer >= 0)
    assert hidden == 512 * WIDTH * 4 * ROWS // CHUNKS < max(boundary.bytes for boundary in anywhere.boundaries)
    assert found.step_s <= 1.1 * anywhere.step_s


def test_what_is_made_of_the_heads_output_stays_with_the_head() -> None:
    found = planned(Net(40, words=4096))
    head = next(stage for stage in found.stages if "head#0" in stage.nodes)
    assert head.index == 3
    assert {"#0/float_0", "#0/cross_entropy_0"} <= set(head.nodes)


def test_nothing_that_fits_is_faster_than_the_plan_by_its_own_table() -> None:
    """The cut that wins in units may take longer between modules; others are then looked at again."""
    sample = torch.empty(ROWS, 512, WIDTH, device="meta")
    found = plan(Net(9).to("meta"), FOUR, CHUNKS, sample=sample)
    assert found.step_s == min(own.step_s for own in found.frontier if own.verdict == "fits")


def test_autosplits_own_planner_keeps_blocks_whole_too() -> None:
    model, sample = Net(13), torch.zeros(8, 4, WIDTH)
    found = trace(model, Sample(sample))

    def own(cut: str) -> Plan:
        devices = (torch.device("cpu"),) * 4
        options = Options(devices, 4, measure=False, cut_between=cut)
        return make_plan(model, found, options, sizes=(2,) * 4)

    modules, operations = own("modules"), own("operations")
    assert operations.step_s <= modules.step_s
    if not said(modules):
        assert not split_blocks(modules)
    assert modules.lower_bound_s <= operations.step_s
