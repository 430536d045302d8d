"""What is known without planning: how much of Llama-70B eight devices of 80 GB hold, what torchgpipe's runs took."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from autosplit.checks import resolve_machine
from autosplit.options import Options, Sample
from autosplit.planning.explain.verdicts import binding, device_verdicts
from autosplit.planning.paper import OnPaper, prepare, stand_ins
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.search.choose import PlanChoice, Search
from autosplit.planning.search.sweep import Space, Sweep
from benchmarks import published
from benchmarks.published_torchgpipe import experiments, predicted, stages_of
from tests.planning.llama import Llama

GIB = 2**30
SEQUENCES, LENGTH = 32, 4096
PARAMETERS = 68_976_648_192
"""Of Llama-2-70B, as its authors' checkpoint has them."""


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def llama() -> OnPaper:
    with torch.device("meta"):
        model, ids = Llama(), torch.empty(SEQUENCES, LENGTH, dtype=torch.int64)
    machine = resolve_machine("8xH100-SXM5-80GB")
    options = Options(stand_ins(machine), SEQUENCES, precision="bf16", recompute=None, measure=False, machine=machine)
    return prepare(model, Sample(ids), options, loss_fn=loss)


def planned(llama: OnPaper, precision: str) -> Plan:
    """Plan for microbatches of one sequence; both precisions have bf16 weights."""
    options = replace(llama.options, precision=precision)
    return PlanChoice(
        Search(
            Sweep(
                RecordedModel(llama.recorded.model, llama.recorded.trace), options, Space((SEQUENCES,)), rows=SEQUENCES
            )
        )
    ).plan


def layers_of(plan: Plan) -> list[float]:
    """Return how many layers each stage has, by their parameters; embedding and head are no part of any."""
    each, around = 855_654_400, [262_144_000] + [0] * 6 + [262_152_192]
    return [(stage.parameters - other) / each for stage, other in zip(plan.stages, around, strict=True)]


@pytest.mark.slow
def test_llama_70b_with_fp32_masters_does_not_fit_eight_devices_and_states_say_why(llama: OnPaper) -> None:
    plan = planned(llama, "bf16_fp32_master")
    assert plan.verdict == "no"
    states = [own.states_bytes for own in device_verdicts(plan)]
    assert sum(states) == pytest.approx(16 * PARAMETERS, rel=1e-3)
    fullest = binding(plan)
    assert fullest is not None
    assert fullest.term == "states"
    assert fullest.states_bytes > 120 * GIB > (fullest.capacity_bytes or 0)


def test_llama_70b_in_pure_bf16_is_borderline_with_fewer_layers_at_both_ends(llama: OnPaper) -> None:
    plan = planned(llama, "bf16")
    assert plan.verdict == "borderline"
    assert sum(own.states_bytes for own in device_verdicts(plan)) == pytest.approx(8 * PARAMETERS, rel=1e-3)
    assert {stage.recompute for stage in plan.stages} == {"block"}
    layers = layers_of(plan)
    assert sum(layers) == pytest.approx(80, abs=0.01)
    assert max(layers[0], layers[-1]) < min(layers[1:-1])


@pytest.mark.parametrize(
    "name", ["U-Net (6,72)", pytest.param("U-Net (11,128) chunks32 [505]", marks=pytest.mark.slow)]
)
def test_torchgpipes_runs_reserve_what_was_published(name: str) -> None:
    row = next(row for row in published.rows() if row["model"] == name)
    experiment = experiments()[name]
    found = predicted(experiment, stages_of(experiment)).reserved_bytes
    assert found == pytest.approx(row["total_reserved_GiB"] * GIB, rel=0.10)
