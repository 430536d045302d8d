"""What a plan recomputes: what was asked for, or under a memory limit the least that fits; and it can be pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit import plan as plan_on_paper
from autosplit.errors import InfeasibleError, PlanError
from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.planning.explain.reasons import without_recompute
from autosplit.planning.plan.plan import Plan
from tests.models.blocks import wide_blocks

WIDTH, ROWS = 16, 256


def value() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def planned(recompute: tuple[str, ...] | None, *, limit: int | None = None) -> Plan:
    devices = (torch.device("cpu"),) * 2
    options = Options(devices, 4, schedule="gpipe", recompute=recompute, memory_limit=limit, measure=False)
    with torch.random.fork_rng():
        pipe = PipelinedModule(wide_blocks(4, WIDTH), options)
        pipe(value())
    assert pipe.plan is not None
    return pipe.plan


def peak(plan: Plan) -> int:
    return max(stage.memory.peak_bytes for stage in plan.stages)


def kinds(plan: Plan) -> set[str]:
    return {stage.recompute for stage in plan.stages}


def test_auto_is_the_fastest_way_that_fits_not_the_first() -> None:
    """Without recompute a limit holds too, by a cut that is slower than doing a little again."""

    def own(recompute: tuple[str, ...] | None, limit: int | None = None) -> Plan:
        devices = (torch.device("cpu"),) * 3
        options = Options(devices, 4, recompute=recompute, memory_limit=limit, measure=False)
        layers = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()) for _ in range(6))
        pipe = PipelinedModule(nn.Sequential(*layers), options)
        pipe(torch.zeros(1024, 16))
        assert pipe.plan is not None
        return pipe.plan

    limit = 3 * peak(own(("never",))) // 4
    never, auto = own(("never",), limit), own(None, limit)
    assert max(peak(never), peak(auto)) <= limit
    assert auto.step_s < never.step_s
    assert kinds(auto) > {"never"}


def test_a_limit_that_holds_only_with_recompute_is_met_and_the_plan_says_how() -> None:
    free, never, always, block = (planned(way) for way in (None, ("never",), ("always",), ("block",)))
    assert kinds(free) == {"never"}
    least = min(peak(always), peak(block))
    assert least < 0.8 * peak(never)
    limit = (least + peak(never)) // 2
    with pytest.raises(InfeasibleError):
        planned(("never",), limit=limit)
    found = planned(None, limit=limit)
    assert peak(found) <= limit
    assert found.fits
    assert kinds(found) != {"never"}
    assert kinds(planned(None, limit=2 * peak(never))) == {"never"}
    with pytest.raises(InfeasibleError):
        planned(None, limit=least // 2)


@pytest.mark.slow
def test_what_is_asked_for_counts_in_time_and_memory() -> None:
    never, always, last, mixed = (
        planned(way) for way in (("never",), ("always",), ("except_last",), ("always", "never"))
    )
    assert [s.recompute for s in mixed.stages] == ["always", "never"]
    for plan, share in ((never, 0.0), (always, 1.0), (last, 0.75)):
        forward_s = sum(stage.forward_s for stage in plan.stages)
        backward_s = sum(stage.backward_s for stage in plan.stages)
        plain_s = sum(stage.backward_s for stage in never.stages)
        assert backward_s == pytest.approx(plain_s + share * forward_s)
    assert never.stages[0].memory.activation_bytes > last.stages[0].memory.activation_bytes
    assert mixed.status == "bounded"
    assert planned(("always", "never"), limit=2 * peak(mixed)).fits
    with pytest.raises(InfeasibleError, match="would hold it"):
        planned(("always", "never"), limit=peak(mixed) // 4)


def test_a_plan_keeps_what_its_stages_recompute(tmp_path: Path) -> None:
    plan = planned(("always", "never"))
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan

    def again(**options: Any) -> Any:
        model = wide_blocks(4, WIDTH)
        return autosplit(model, devices=["cpu"] * 2, chunks=4, plan=path, **options)

    pipe = again(recompute=["always", "never"])
    pipe(value()).sum().backward()
    assert [stage.recompute for stage in pipe.plan.stages] == ["always", "never"]
    assert "recompute = True" in pipe.code
    with pytest.raises(PlanError, match=r"\['always', 'never'\].*'block'"):
        again(recompute="block")
    path.write_text(path.read_text().replace('"always"', '"sometimes"'))
    with pytest.raises(PlanError, match="recompute"):
        Plan.load(path)


class Block(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Dropout(dropout)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.drop(self.down(torch.relu(self.up(value))))


@pytest.mark.parametrize(("dropout", "least", "most"), [(0.0, 0.5, 0.85), (0.1, 0.85, 1.0)])
def test_the_last_product_is_not_made_again(dropout: float, least: float, most: float) -> None:
    """Its input is kept, and nothing behind it; a dropout behind it keeps its mask, so that it is."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(dropout=dropout) for _ in range(4)))
    sample = torch.zeros(65536, 256, device="meta")
    made = plan_on_paper(model, "2xA100-SXM4-80GB", sample=sample, chunks=4, schedule="1f1b", recompute="block")
    stage = made.stages[0]
    assert stage.again_s is not None
    assert least < stage.again_s / stage.forward_s < most
    bare = without_recompute(made).stages[0]
    assert bare.backward_s == pytest.approx(stage.backward_s - stage.again_s)
