"""The partition report: its text (golden), its width, and the sentences that depend on the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Boundary
from autosplit.report.sections import render
from autosplit.report.words import fit_modules, some_numbers
from tests.report.plans import GIB, MIB, gpt2_plan, make_plan, make_stage


@pytest.mark.parametrize("width", [80, 100, 120])
def test_report_text(width: int, golden: Callable[[str, str], None]) -> None:
    golden(f"gpt2_{width}.txt", render(gpt2_plan(), width=width) + "\n")


def test_report_of_several_stages_per_device(golden: Callable[[str, str], None]) -> None:
    lanes = (0, 1, 1, 0)
    plan = make_plan(
        stages=tuple(make_stage(stage, lane=lane, peak_bytes=(9 + lane) * GIB) for stage, lane in enumerate(lanes)),
        schedule="zb_v",
        virtual_stages=2,
    )
    golden("virtual.txt", render(plan) + "\n")


def test_a_large_grid_is_left_out_and_an_own_schedule_is_called_that() -> None:
    rows = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    plan = make_plan(schedule="mine", schedule_rows=rows, microbatch_rows=(2, 2))
    assert "schedule   mine (from an action file), optimizer" in render(plan)
    assert "lane 1 | .   1F0 1B0 1F1 1B1" in render(plan)
    assert "Schedule (" not in render(make_plan())
    assert "Schedule (" not in render(make_plan(schedule="zb_h1", chunks=64, microbatch_rows=(2,) * 64))


def test_report_of_a_plain_plan(golden: Callable[[str, str], None]) -> None:
    golden("plain.txt", render(make_plan()) + "\n")


def test_a_page_too_narrow_for_the_tables_gets_the_narrowest_report() -> None:
    assert render(gpt2_plan(), width=20) == render(gpt2_plan(), width=80)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("h.0", "h.1", "h.2"), "h.0-h.2"),
        (("h.10", "h.9", "h.11"), "h.9-h.11"),
        (("h.0", "h.2", "h.3", "h.7"), "h.0, h.2-h.3, h.7"),
        (("model.encoder.layers.0", "model.encoder.layers.1"), "model.encoder.layers.0-layers.1"),
        (("0", "1", "2"), "0-2"),
        (("wte", "h.0", "drop", "h.1"), "wte, h.0-h.1, drop"),
        (("h.0.attn", "h.1.attn"), "h.0.attn, h.1.attn"),
        (("conv1", "conv2"), "conv1, conv2"),
        (("h.0", "h.0"), "h.0"),
        (("",), "(root)"),
        ((), "-"),
    ],
)
def test_modules_become_ranges(names: tuple[str, ...], text: str) -> None:
    assert fit_modules(names, width=None) == text


def test_a_stage_lists_whole_subtrees_and_says_what_it_shares() -> None:
    stages = (
        make_stage(0, modules=("embed", "h.0.norm", "h.0.attn.query", "h.0.attn", "h.0", "h.1.norm", "h.1")),
        make_stage(1, modules=("h.1.attn", "h.1", "h.2.norm", "h.2", "h.3.norm", "Net")),
        make_stage(2, modules=("Net", "head.proj", "head.norm")),
    )
    rows = [line.split("  ") for line in render(make_plan(stages=stages), width=160).splitlines()[11:14]]
    modules = [next(cell.strip() for cell in row if "h" in cell) for row in rows]
    assert modules == [
        "embed, h.0, h.1.norm, h.1 (part)",
        "h.1.attn, h.1 (part), h.2-h.3, Net (part)",
        "Net (part), head",
    ]


def line_of(plan: Plan, *, label: str) -> str:
    """Return the line of the report that starts with ``label``, on a page where nothing is broken."""
    return next(line.strip() for line in render(plan, width=400).splitlines() if line.strip().startswith(label))


def test_times_say_where_they_come_from() -> None:
    assert "measured node times" in render(make_plan(measured=True))
    modelled = render(make_plan(measured=False))
    assert "modelled node times (nothing was measured)" in modelled
    assert "per microbatch, modelled)" in modelled


@pytest.mark.parametrize(("full", "state"), [(0.5, "has collapsed"), (0.1, "is held back")])
def test_a_large_full_share_is_said_in_a_sentence(full: float, state: str) -> None:
    line = line_of(make_plan(class_flops={"micro": 1 - full, "full": full, "shared": 0.0}), label="pipeline")
    assert f"The pipeline {state}: {full:.0%} of the work mixes rows" in line
    assert f"at most {1 / (full + (1 - full) / 2):.2f} times" in line


def test_what_a_stage_sends_counts_every_consumer() -> None:
    skip = Boundary(value="h.0#0", producer=0, consumers=(1, 2, 3), bytes=2 * MIB)
    tie = Boundary(value="wte.weight", producer=0, consumers=(3,), bytes=100 * MIB, per_step=True)
    plan = make_plan(stages=tuple(make_stage(index) for index in range(4)), boundaries=(skip, tie))
    assert "6.00 MiB to 1-3" in render(plan)


def test_a_value_for_many_stages_does_not_widen_the_table() -> None:
    reached = tuple(range(1, 100, 2))
    plan = make_plan(
        devices=("cpu",) * 100,
        stages=tuple(make_stage(stage, lane=stage) for stage in range(100)),
        boundaries=(Boundary(value="mask", producer=0, consumers=reached, bytes=MIB),),
    )
    text = render(plan, width=80)
    assert "50.0 MiB to 50 of 1-99" in text
    assert max(map(len, text.splitlines())) <= 80
    assert some_numbers(reached[:3]) == "1, 3, 5"
    assert some_numbers((1, 2, 4, 6, 8)) == "1-2, 4, 6, 8"
