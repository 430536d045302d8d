"""Published formulas against published numbers, and the schedules against the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autosplit.memory.published import (
    TransformerShape,
    first_device_activation_bytes,
    layer_activation_bytes,
    layer_parameters,
)
from autosplit.memory.stage import lane_loads
from autosplit.schedule.catalog import build

GIB = 2**30
ROWS = json.loads((Path(__file__).parent / "data" / "megatron_memory.json").read_text())["rows"]
MEGATRON_BYTES_PER_PARAMETER = 18
"""bf16 parameter 2, fp32 main gradient 4, fp32 master 4 and Adam's moments 8."""


def test_a_layer_is_sbh_34_and_5as_over_h() -> None:
    shape = TransformerShape(sequence=1024, batch=4, hidden=768, heads=12)
    assert layer_activation_bytes(shape) == 1024 * 4 * 768 * (34 + 5 * 12 * 1024 / 768)
    assert layer_activation_bytes(shape, selective_recompute=True) == 34 * 1024 * 4 * 768
    assert layer_activation_bytes(shape, sequence_parallel=True) == layer_activation_bytes(shape)


def test_tensor_and_sequence_parallelism_of_a_layer() -> None:
    shape = TransformerShape(sequence=100, batch=1, hidden=80, heads=8, tensor_parallel=8)
    assert layer_activation_bytes(shape) == 8000 * (10 + 24 / 8 + 5 * 8 * 100 / (80 * 8))
    assert layer_activation_bytes(shape, sequence_parallel=True) == pytest.approx(8000 / 8 * (34 + 50))


@pytest.mark.parametrize("row", ROWS, ids=[row["model"] for row in ROWS])
def test_rows_of_the_paper(row: dict[str, float]) -> None:
    shape = TransformerShape(
        row["sequence"], row["microbatch"], row["hidden"], row["heads"], tensor_parallel=row["tensor_parallel"]
    )
    pipeline = {"layers": row["layers"], "stages": row["stages"], "virtual_stages": row["virtual_stages"]}
    own = layer_parameters(row["hidden"]) * row["layers"] / (row["stages"] * row["tensor_parallel"])
    none = first_device_activation_bytes(shape, **pipeline)
    selective = first_device_activation_bytes(shape, **pipeline, sequence_parallel=True, selective_recompute=True)
    assert own * MEGATRON_BYTES_PER_PARAMETER / GIB == row["param_opt_gib"]
    assert none / GIB == pytest.approx(row["activations_none_gib"], rel=1e-12)
    assert selective / GIB == pytest.approx(row["activations_selective_gib"], rel=1e-12)


@pytest.mark.parametrize(("stages", "virtual", "microbatches"), [(4, 1, 12), (8, 1, 8), (4, 2, 16), (8, 3, 32)])
def test_the_schedules_hold_what_the_paper_says_of_the_first_device(
    stages: int, virtual: int, microbatches: int
) -> None:
    name = "1f1b" if virtual == 1 else "interleaved"
    schedule = build(name, stages=stages * virtual, microbatches=microbatches, virtual_stages=virtual)
    loads = lane_loads(schedule, device=0, recompute=dict.fromkeys(range(stages * virtual), "never"))
    most = max(
        sum(count for part, count in load.counts.items() if part.what == "saved") for load in loads if load.kind == "B"
    )
    shape = TransformerShape(sequence=64, batch=2, hidden=32, heads=4)
    layer = layer_activation_bytes(shape)
    layers = stages * virtual
    assert most * layer == pytest.approx(
        first_device_activation_bytes(shape, layers=layers, stages=stages, virtual_stages=virtual), rel=1e-12
    )
