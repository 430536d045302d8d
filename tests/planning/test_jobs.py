"""Exports of whole jobs: they are read dry, by the keys and the arguments that torchtitan and Megatron-LM have."""

from __future__ import annotations

import argparse
import shlex
import tomllib
import warnings
from typing import Any

import pytest

from autosplit import InputError, Plan
from autosplit.planning.plan.fields import MeshDegrees
from tests.report.plans import make_plan, make_stage

TITAN: dict[str, dict[str, type]] = {
    "training": {"local_batch_size": int, "global_batch_size": int, "seq_len": int, "mixed_precision_param": str},
    "parallelism": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "tensor_parallel_degree": int,
        "pipeline_parallel_degree": int,
        "pipeline_parallel_schedule": str,
        "pipeline_parallel_microbatch_size": int,
        "module_fqns_per_model_part": list,
    },
    "activation_checkpoint": {"mode": str},
}
"""Of `torchtitan/config/job_config.py`, classes Training, Parallelism, ActivationCheckpoint (commit 000204a4)."""


def megatron() -> argparse.ArgumentParser:
    """Of Megatron-LM's `megatron/training/arguments.py` and `docs/.../megatron_fsdp.md`, what an export may have."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    numbers = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size")
    for name in (*numbers, "seq-length", "recompute-num-layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--pipeline-model-parallel-layout", type=str)
    parser.add_argument("--recompute-granularity", type=str, choices=["full", "selective"])
    parser.add_argument("--recompute-method", type=str, choices=["uniform", "block"])
    strategies = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    parser.add_argument("--data-parallel-sharding-strategy", type=str, choices=strategies)
    parser.add_argument("--ckpt-format", type=str, choices=["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"])
    parser.add_argument("--fp8-format", type=str, choices=["e4m3", "hybrid"])
    parser.add_argument("--no-gradient-accumulation-fusion", action="store_false")
    for name in ("sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("use-megatron-fsdp", "bf16"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def decoder(*, recompute: tuple[str, ...] = ("never", "never"), **fields: Any) -> Plan:
    """Four blocks of a decoder of transformers in two stages."""
    names = (
        ("model.embed_tokens#0", "model.layers.0.mlp#0", "model.layers.1.mlp#0"),
        ("model.layers.2.mlp#0", "model.layers.3.mlp#0", "model.norm#0", "lm_head#0"),
    )
    stages = tuple(
        make_stage(index, recompute=again).model_copy(update={"nodes": own, "modules": own})
        for index, (own, again) in enumerate(zip(names, recompute, strict=True))
    )
    mesh = MeshDegrees(dp=4, tp=2, pp=2, **fields.pop("mesh", {}))
    return make_plan(stages=stages, sequence=2048, precision="bf16_fp32_master").model_copy(
        update={"mesh": mesh} | fields
    )


def test_torchtitans_config_has_degrees_batch_recompute_and_modules() -> None:
    plan = decoder(recompute=("block", "block"), mesh={"zero": 3})
    found = tomllib.loads(plan.export("torchtitan-toml"))
    for section, settings in found.items():
        assert settings.keys() <= TITAN[section].keys()
        assert all(isinstance(value, TITAN[section][name]) for name, value in settings.items())
    rows = sum(plan.microbatch_rows)
    assert found["training"] == {
        "local_batch_size": rows,
        "global_batch_size": 4 * rows,
        "seq_len": 2048,
        "mixed_precision_param": "bfloat16",
    }
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 4,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": plan.microbatch_rows[0],
        "module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3", "norm", "output"],
        ],
    }
    assert found["activation_checkpoint"] == {"mode": "full"}
    plain = tomllib.loads(decoder().export("torchtitan-toml"))
    assert plain["parallelism"]["data_parallel_replicate_degree"] == 4
    assert plain["activation_checkpoint"] == {"mode": "none"}


def test_megatrons_arguments() -> None:
    plan = decoder(recompute=("block", "always"), mesh={"zero": 1, "sequence": True})
    found = megatron().parse_args(shlex.split(plan.export("megatron-args")))
    assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == (2, 2)
    assert (found.micro_batch_size, found.global_batch_size) == (plan.microbatch_rows[0], 4 * sum(plan.microbatch_rows))
    assert (found.seq_length, found.pipeline_model_parallel_layout) == (2048, "Ett|ttL")
    assert (found.recompute_granularity, found.recompute_method, found.recompute_num_layers) == ("full", "uniform", 1)
    assert found.sequence_parallel
    assert found.use_distributed_optimizer
    assert found.bf16
    assert not found.use_megatron_fsdp
    shards = megatron().parse_args(shlex.split(decoder(mesh={"zero": 3}).export("megatron-args")))
    assert (shards.use_megatron_fsdp, shards.data_parallel_sharding_strategy) == (True, "optim_grads_params")


def test_what_a_job_cannot_say() -> None:
    with pytest.raises(InputError, match="shards nothing or all, and the plan is ZeRO-1"):
        decoder(mesh={"zero": 1}).export("torchtitan-toml")
    with pytest.raises(InputError, match=r"microbatches of .* are no one size"):
        decoder(microbatch_rows=(2, 1)).export("megatron-args")
    with pytest.raises(InputError, match="Megatron-LM runs 1f1b and interleaved, and the plan is 'zb_h1'"):
        decoder(schedule="zb_h1").export("megatron-args")
    with pytest.raises(InputError, match="torchtitan has no schedule 'zb_h1' by name"):
        decoder(schedule="zb_h1").export("torchtitan-toml")
    with pytest.warns(UserWarning, match="stages 1 recompute, which these tools set for all stages"):
        decoder(recompute=("never", "block")).export("megatron-args")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder().export("megatron-args")
