"""Plans on a mesh: degrees that are given or chosen, what a rank holds, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autosplit import InputError, Plan, PlanError, plan
from autosplit.parallel import Parallel
from autosplit.planning.parallel.reasons import Weighed, simplest
from autosplit.planning.plan.fields import MeshAlternative, MeshDegrees
from autosplit.report.page import page
from autosplit.report.prediction import meshes
from autosplit.report.sections import header
from tests.planning.llama import Llama


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


def _llama(**choices: Any) -> Plan:
    with torch.device("meta"):
        model = Llama(width=512, inner=1024, layers=choices.pop("layers", 4), heads=8, groups=4)
    sample = torch.zeros(choices.pop("rows", 16), 256, dtype=torch.int64, device="meta")
    own = {"devices": "8xH100-SXM5-80GB", "precision": "bf16_fp32_master", "loss_fn": _loss, **choices}
    own = own if "mesh" not in own else {"runtime": "megatron", **own}
    return plan(model, sample=sample, **own)


@pytest.fixture(scope="module")
def given() -> Plan:
    return _llama(mesh={"dp": 2, "tp": 2, "pp": 2}, zero=1, schedule="1f1b", chunks=4, recompute="never")


def test_a_given_mesh(given: Plan) -> None:
    """Two stages of ranks that have half of every product, half of the batch and half of the optimizer's state."""
    assert str(given.mesh) == "dp=2, tp=2, pp=2, ZeRO-1, sequence parallel"
    assert given.devices == ("H100-SXM5-80GB",) * 2
    assert sum(given.microbatch_rows) == 8
    memory = [stage.memory for stage in given.stages]
    parameters = sum(own.parameter_bytes for own in memory)
    assert given.parameters == pytest.approx(parameters, rel=0.02)  # two bytes, half of them
    assert sum(own.optimizer_bytes for own in memory) == pytest.approx(6 * parameters / 2, rel=0.01)
    assert all(own.communicator_bytes for own in memory)
    assert given.rows_per_s == pytest.approx(16 / given.step_s)
    assert given.tokens_per_s == pytest.approx(16 * 256 / given.step_s)
    assert 0 < given.update_s < given.step_s


def test_parameters_in_shards_are_whole_by_two_blocks_or_for_a_step() -> None:
    asked: dict[str, Any] = {"schedule": "1f1b", "chunks": 2, "recompute": "never", "precision": "bf16"}
    asked["runtime"] = "autosplit"
    plain, never, always = (
        _llama(mesh={"dp": 4, "pp": 2}, layers=16, **asked, **options)
        for options in ({"zero": 0}, {"zero": 3}, {"zero": 3, "fsdp_reshard": "always"})
    )
    for whole, step, blocks in zip(plain.stages, never.stages, always.stages, strict=True):
        size = whole.memory.parameter_bytes
        assert step.memory.parameter_bytes == pytest.approx(size + size / 4, rel=0.01)
        assert blocks.memory.parameter_bytes == pytest.approx(size / 4, rel=0.01)
        assert blocks.memory.peak_bytes < step.memory.peak_bytes
    assert Plan.model_validate_json(always.to_json()).mesh == always.mesh
    with pytest.raises(InputError, match="on a mesh with zero=3"):
        _llama(mesh={"dp": 4, "pp": 2}, zero=0, fsdp_reshard="always")


def test_sums_in_fp32_and_shards_in_fp32_are_counted() -> None:
    """A policy: fp32 shards and state; what is gathered is in bf16, and what is added up as it says."""
    asked: dict[str, Any] = {"schedule": "1f1b", "chunks": 2, "recompute": "never", "runtime": "autosplit"}
    asked |= {"mesh": {"dp": 4, "pp": 2}, "layers": 4, "precision": "bf16"}
    wide, policy = {"reduce_dtype": torch.float32}, MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shards: dict[str, Any] = {"zero": 3, "mp_policy": policy}
    plain, added = (_llama(zero=0, **asked, **options) for options in ({}, wide))
    bf16, never, always = (
        _llama(**asked, **options) for options in ({"zero": 3}, shards, {**shards, "fsdp_reshard": "always"})
    )
    for index, own in enumerate(stage.memory for stage in plain.stages):
        size = own.parameter_bytes
        assert added.stages[index].memory.gradient_bytes == pytest.approx(2 * own.gradient_bytes, rel=0.01)
        assert added.stages[index].memory.peak_bytes > own.peak_bytes
        assert never.stages[index].memory.parameter_bytes == pytest.approx(size + size / 2, rel=0.01)
        assert never.stages[index].memory.gradient_bytes == pytest.approx(2 * own.gradient_bytes, rel=0.01)
        assert never.stages[index].memory.optimizer_bytes == pytest.approx(own.optimizer_bytes / 2, rel=0.01)
    whole = [sum(stage.memory.parameter_bytes for stage in each.stages) for each in (plain, always)]
    assert whole[1] == pytest.approx(whole[0] / 2, rel=0.01)
    assert plain.update_s < added.update_s
    assert bf16.update_s < never.update_s
    assert Plan.model_validate_json(never.to_json()).mesh == never.mesh
    for text, wrong in {
        "on a mesh with zero=3": {"zero": 0, "mp_policy": policy},
        "leave reduce_dtype= out": {**shards, **wide},
        "valid: None, torch.float32": {"reduce_dtype": torch.bfloat16},
        "valid: None$": {"runtime": "megatron", **wide},
    }.items():
        with pytest.raises(InputError, match=text):
            _llama(**{**asked, **wrong})


@pytest.mark.parametrize(("reshard", "parameters"), [("never", 5 / 4), ("always", 1 / 4)])
def test_replicas_share_out_what_ranks_of_tp_have(reshard: str, parameters: float) -> None:
    """Of half of the products they gather and sum half as many bytes as without tp."""
    asked: dict[str, Any] = {"schedule": "1f1b", "chunks": 2, "recompute": "never", "runtime": "autosplit", "zero": 3}
    asked |= {"fsdp_reshard": reshard, "precision": "bf16", "optimizer": "sgd", "layers": 2}
    plain = _llama(mesh={"dp": 4, "tp": 2}, **{**asked, "zero": 0, "fsdp_reshard": "never"})
    whole = _llama(mesh={"dp": 4}, devices="4xH100-SXM5-80GB", **asked)
    both = _llama(mesh={"dp": 4, "tp": 2}, **asked)
    size, held = plain.stages[0].memory.parameter_bytes, both.stages[0].memory
    assert held.parameter_bytes == pytest.approx(parameters * size, rel=0.01)
    assert held.gradient_bytes <= size / (1 if reshard == "never" else 4) * 1.01
    assert held.peak_bytes < whole.stages[0].memory.peak_bytes
    assert 0.49 < both.update_s / whole.update_s < 0.6  # collectives take a while, however little they bring


def test_replicas_hold_a_bucket_of_gradients() -> None:
    """Behind the last backward there is a copy of the gradients that are added up: of one large weight all of it."""
    model, sample = nn.Linear(2048, 2048, bias=False, device="meta"), torch.zeros(4, 2048, device="meta")
    asked: dict[str, Any] = {"optimizer": "sgd", "chunks": 1, "recompute": "never", "zero": 0}
    alone, two = (plan(model, f"{n}xcpu-lane", sample=sample[: 2 * n], mesh={"dp": n}, **asked) for n in (1, 2))
    held = [own.stages[0].memory.peak_bytes / (4 * 2048**2) for own in (alone, two)]
    assert held == pytest.approx([2, 3], rel=0.01)


def test_a_saved_plan_is_costed_anew(given: Plan, tmp_path: Path) -> None:
    """A plan's mesh is followed with its cut: the same figures for the same batch, others for another."""
    given.save(tmp_path / "plan.json")
    again = _llama(plan=tmp_path / "plan.json", precision=None)
    assert (again.mesh, again.step_s) == (given.mesh, given.step_s)
    assert [own.memory for own in again.stages] == [own.memory for own in given.stages]
    other = _llama(plan=given, precision=None, rows=32)
    assert replace(other.decision, microbatch_rows=given.microbatch_rows) == given.decision
    assert other.prediction != given.prediction == again.prediction
    assert other.prediction.step_s > given.step_s
    older = given.mesh.model_dump(exclude={"runtime"}) if given.mesh is not None else {}
    assert MeshDegrees(**older) == given.mesh  # files without a runtime were made by Megatron-LM's rules
    with pytest.raises(PlanError, match="2 replicas, which do not divide the batch of 17 rows"):
        _llama(plan=given, precision=None, rows=17)
    with pytest.raises(InputError, match="leave find= and plan= out"):
        _llama(plan=given, mesh="auto")
    with pytest.raises(InputError, match="runtime='torchtitan' and a plan for 'megatron': leave runtime= out"):
        _llama(plan=given, runtime="torchtitan")


@pytest.mark.parametrize(("runtime", "least", "most"), [("autosplit", 0.55, 0.9), ("megatron", 0.5, 0.56)])
def test_tensor_parallel_ranks_hold_less(runtime: str, least: float, most: float) -> None:
    """A rank has half of what lies between products and of what these take; autosplit's last stage has whole logits."""
    asked: dict[str, Any] = {"zero": 0, "schedule": "1f1b", "chunks": 4, "recompute": "never", "runtime": runtime}
    asked["optimizer"] = "none"  # else the most is held in its step
    own, whole = _llama(mesh="dp=4,tp=2", rows=64, **asked), _llama(mesh="dp=8", rows=128, **asked)
    assert str(own.mesh) == "dp=4, tp=2, pp=1" + ", sequence parallel" * (runtime == "megatron")
    assert ("assumed" in dict(header(own).facts)) is (runtime == "megatron")
    for stage, other in zip(own.stages, whole.stages, strict=True):
        assert least <= stage.memory.activation_bytes / other.memory.activation_bytes < most
        assert stage.memory.parameter_bytes < 0.52 * other.memory.parameter_bytes


@pytest.mark.parametrize(("runtime", "least", "most"), [("autosplit", 0.6, 0.8), ("megatron", 0.2, 0.3)])
def test_the_loss_is_shared_over_the_words(runtime: str, least: float, most: float) -> None:
    """Logits and what the loss makes of them are most of a small model's peak; autosplit has them whole."""
    asked: dict[str, Any] = {"schedule": "1f1b", "chunks": 1, "recompute": "never", "layers": 1, "zero": 0, "rows": 8}
    plans = [_llama(mesh=mesh, devices=devices, runtime=runtime, **asked) for mesh, devices in _ONE_AND_FOUR]
    whole, own = (plan.stages[0].memory for plan in plans)
    moving = [each.peak_bytes - each.parameter_bytes - each.optimizer_bytes for each in (whole, own)]
    assert least < moving[1] / moving[0] < most


_ONE_AND_FOUR = (("dp=1", "1xH100-SXM5-80GB"), ("tp=4", "4xH100-SXM5-80GB"))


_STAGES = [(0, 1, 1), (1, 1, 1), (2, 1, 1 / 8), (3, 1 / 8, 1 / 8)]


@pytest.mark.parametrize(
    ("runtime", "zero", "parameters", "gradients"),
    [*(("megatron", *each) for each in _STAGES), ("autosplit", 0, 1, 1), ("autosplit", 3, 9 / 8, 1)],
)
def test_zero_stages(runtime: str, zero: int, parameters: float, gradients: float) -> None:
    """Eight replicas shard the optimizer's state from ZeRO-1 on, gradients from 2 on, parameters in 3.

    Ranks of autosplit hold a stage whole through the step, beside their shard; its gradients are scattered behind it.
    """
    found = _llama(mesh={"dp": 8}, zero=zero, chunks=2, layers=2, recompute="never", runtime=runtime)
    memory, count = found.stages[0].memory, 2 * found.parameters
    kinds = [type(entry).__name__ for entry in found.actions[0]]
    whole = (runtime, zero) == ("autosplit", 3)
    assert (kinds[0], kinds[-1]) == (
        ("Unshard", "Reshard") if whole else ("Unshard" if zero in (1, 2) else "Action", kinds[-1])
    )
    assert memory.parameter_bytes == pytest.approx(parameters * count, rel=0.01)
    assert memory.gradient_bytes <= 1.01 * gradients * count
    assert memory.optimizer_bytes == pytest.approx(6 * count / (8 if zero else 1), rel=0.01)


def test_the_best_mesh_says_why() -> None:
    """A small model is trained by replicas alone; the report and the JSON have the mesh, and what others take."""
    found = _llama(mesh="auto", schedule="1f1b", recompute="never", layers=2)
    assert found.mesh is not None
    assert (found.mesh.dp, found.mesh.tp, found.mesh.pp) == (8, 1, 1)
    assert found.reasons[0].startswith("plain data parallelism alone is enough (dp=8, tp=1, pp=1, ZeRO-1): ")
    assert " the best other mesh" in found.reasons[0]
    assert "and fits" in found.reasons[0]
    assert len({(own.mesh.dp, own.mesh.tp, own.mesh.pp) for own in found.meshes}) >= 6
    assert [own.step_s for own in found.meshes] == sorted(own.step_s for own in found.meshes)


def test_the_simplest_mesh_within_the_error_is_chosen() -> None:
    plain, sharded, both = Parallel(8), Parallel(8, zero=3), Parallel(4, tp=2, zero=3)
    assert simplest([Weighed(0, 1.0, both), Weighed(0, 1.03, sharded), Weighed(0, 1.2, plain)]) == 1
    assert simplest([Weighed(0, 1.0, both), Weighed(0, 1.04, sharded)]) == 0
    assert simplest([Weighed(1, 1.0, plain), Weighed(0, 9.0, both)]) == 1
    assert simplest([Weighed(0, 1.01, plain), Weighed(0, 1.0, plain)]) == 1


def test_bounds_are_no_plans(given: Plan) -> None:
    """What was not searched stands in a list of its own, and older files' bounds are read as such."""
    rows = [MeshAlternative(mesh=given.mesh, step_s=1.0, verdict=verdict) for verdict in ("fits", "no", None)]
    assert [row.bound for row in rows] == [False, False, True]
    small = MeshAlternative(mesh=given.mesh, step_s=0.1, verdict="no", bound=True)
    shown = given.model_copy(update={"meshes": (small, *rows)})
    assert MeshAlternative.model_validate_json(small.model_dump_json()) == small
    planned, left = meshes(shown)
    assert "Other meshes that were planned" in page(shown)
    assert planned.columns[-1].cells == ("fits", "no")
    assert [point.split(":")[0] for point in left.points] == [
        "1 mesh, parameters, gradients and optimizer state alone are more than a device has",
        "1 mesh, by the lower bounds of their steps no better than the plan",
    ]


def test_a_batch_that_no_mesh_holds() -> None:
    """The plan says no, and which mesh comes closest."""
    found = _llama(
        mesh="auto", memory_limit="40MiB", devices="2xL4-24GB", layers=2, chunks=4, recompute="never", schedule="1f1b"
    )
    assert found.verdict == "no"
    assert found.reasons[0].startswith("no mesh of these devices holds a step of this batch; dp=")


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"mesh": {"dp": 3, "tp": 2}}, "dp=3 x tp=2 has 6 ranks, devices names 8"),
        ({"mesh": {"dp": 2, "sp": 4}}, "mesh has a dimension 'sp'; valid: pp, dp, cp, tp, ep"),
        ({"mesh": {"dp": 4, "cp": 2, "ep": 3}}, "ep=3 ranks share experts among the dp x cp = 8"),
        ({"mesh": {"cp": 8, "ep": 2}}, "ep=2 ranks share experts, and the model no parameters of several experts"),
        ({"mesh": {"dp": 2, "cp": 3}}, "dp=2 x cp=3 has 6 ranks, devices names 8"),
        ({"mesh": "dp=8;tp=2"}, "give 'auto', or degrees such as"),
        ({"mesh": {"dp": 0, "tp": 8}}, "mesh has dp=0; give an int of at least 1"),
        (
            {"runtime": "autosplit", "zero": 1},
            "zero=1 is none .* it has 0, 3; .* or runtime='meg",
        ),
        (
            {"runtime": "autosplit", "zero": 2, "mesh": "dp=4,tp=2"},
            "zero=2 is none .* of dp=4,tp=2,pp=1, where it has 0, 3;",
        ),
        ({"runtime": "torchtitan", "zero": 0, "mesh": "dp=4,pp=2"}, "zero=0 is none .*, where it has 3; give"),
        ({"schedule": "gpipe"}, "schedule='gpipe' is none of runtime='megatron', which has 1f1b, interleaved"),
        ({"runtime": "deepspeed"}, "runtime='deepspeed' is not available"),
        ({"mesh": None, "runtime": "megatron"}, "give mesh= too"),
        (
            {"mesh": "dp=4,pp=2", "schedule": "interleaved", "chunks": 3, "layers": 4},
            r"rounds of pp microbatches, and pp divides none of chunks=\[3\]; give",
        ),
    ],
)
def test_what_is_no_mesh_and_what_a_runtime_does_not_have(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        _llama(**{"mesh": "dp=8", "layers": 1, **asked})
