"""A plan as the settings of a training job: torchtitan's TOML, and Megatron-LM's arguments.

They say degrees, batch, recompute, precision and the layout of a plan; what the model and its data are stands in the
job's other settings. Keys of torchtitan: `torchtitan/config/job_config.py`. Arguments of Megatron-LM:
`megatron/training/arguments.py`, and its guide to Megatron-FSDP for ZeRO-2 and -3.
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Sequence

from autosplit.errors import InputError
from autosplit.planning.plan.fields import MeshDegrees
from autosplit.planning.plan.record import PlanRecord

_TITAN_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS"}
_TITAN_SCHEDULES |= {"zb_v": "ZBVZeroBubble"}
_TITAN_NAMES = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
"""What torchtitan calls the modules of transformers' decoders; ``model.layers.0`` is its ``layers.0``."""
_SHARDS = {2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's names of ZeRO stages."""


def torchtitan_job(plan: PlanRecord, parts: Sequence[Sequence[str]]) -> str:
    """Return the sections of a torchtitan config; ``parts`` are the modules of each stage."""
    mesh = _mesh(plan)
    if mesh.zero in (1, 2):
        raise InputError(f"torchtitan shards nothing or all, and the plan is ZeRO-{mesh.zero}; plan with zero=3")
    rows, each = sum(plan.microbatch_rows), _rows_each(plan)
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if mesh.zero else mesh.dp,
        "data_parallel_shard_degree": mesh.dp if mesh.zero else 1,
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
    }
    tokens = {"context_parallel_degree": mesh.cp, "expert_parallel_degree": mesh.ep}
    parallelism |= {name: degree for name, degree in tokens.items() if degree > 1}
    if mesh.pp > 1:
        if plan.schedule not in _TITAN_SCHEDULES or plan.schedule_rows:
            raise InputError(
                f"torchtitan has no schedule {plan.schedule!r} by name; plan one of {', '.join(_TITAN_SCHEDULES)}, or "
                "give it the file of export('torch-csv')"
            )
        parallelism |= {
            "pipeline_parallel_schedule": _TITAN_SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": each,
            "module_fqns_per_model_part": [[_titan_name(name) for name in part] for part in parts],
        }
    training: dict[str, object] = {
        "local_batch_size": rows if mesh.pp > 1 else each,
        "global_batch_size": rows * mesh.dp,
    }
    if plan.sequence is not None:
        training["seq_len"] = plan.sequence
    training["mixed_precision_param"] = "float32" if plan.precision == "fp32" else "bfloat16"
    sections: dict[str, dict[str, object]] = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": "full" if _recomputes(plan) else "none"},
    }
    lines = []
    for title, settings in sections.items():
        lines += [f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items()), ""]
    return "\n".join(lines)


def megatron_job(plan: PlanRecord, layout: str) -> str:
    """Return Megatron-LM's arguments, one line; ``layout`` is its pipeline's, in its own string form."""
    mesh = _mesh(plan)
    tokens = {"context-parallel-size": mesh.cp, "expert-model-parallel-size": mesh.ep}
    arguments = {
        "tensor-model-parallel-size": mesh.tp,
        "pipeline-model-parallel-size": mesh.pp,
        "micro-batch-size": _rows_each(plan),
        "global-batch-size": sum(plan.microbatch_rows) * mesh.dp,
        **{name: degree for name, degree in tokens.items() if degree > 1},
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    if plan.sequence is not None:
        words += ["--seq-length", str(plan.sequence)]
    if mesh.pp > 1:
        if plan.schedule not in ("1f1b", "interleaved"):
            raise InputError(f"Megatron-LM runs 1f1b and interleaved, and the plan is {plan.schedule!r}")
        words += ["--pipeline-model-parallel-layout", layout.strip()]
    if mesh.sequence:
        words.append("--sequence-parallel")
    if mesh.zero:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if mesh.zero in _SHARDS:
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", _SHARDS[mesh.zero]]
        words += ["--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor"]
    if plan.precision in ("bf16", "bf16_fp32_master", "amp_bf16", "fp8"):
        words.append("--bf16")
    if plan.precision == "fp8":
        words += ["--fp8-format", "hybrid"]
    if _recomputes(plan):
        words += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return shlex.join(words) + "\n"


def _mesh(plan: PlanRecord) -> MeshDegrees:
    return plan.mesh or MeshDegrees(dp=1, tp=1, pp=len(plan.devices))


def _rows_each(plan: PlanRecord) -> int:
    """Return the rows of every microbatch; InputError where they differ, which neither tool runs."""
    sizes = set(plan.microbatch_rows)
    if len(sizes) > 1:
        raise InputError(
            f"microbatches of {sorted(sizes)} rows are no one size; plan with chunks= that divides the batch"
        )
    return sizes.pop()


def _recomputes(plan: PlanRecord) -> bool:
    """Return whether the job recomputes, which is all stages or none there; warns where the plan's differ."""
    again = [stage.index for stage in plan.stages if stage.recompute != "never"]
    if again and len(again) < len(plan.stages):
        warnings.warn(
            f"stages {', '.join(map(str, again))} recompute, which these tools set for all stages: the job recomputes "
            'everywhere, and is slower than the plan; recompute="block" plans that',
            UserWarning,
            stacklevel=5,
        )
    return bool(again)


def _titan_name(name: str) -> str:
    return _TITAN_NAMES.get(name, name.removeprefix("model.") if name.startswith("model.layers.") else name)
