"""Plans that are written by hand: what a report is made of, without a model."""

from __future__ import annotations

from typing import Any

from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Boundary, Fingerprint, StagePlan
from autosplit.planning.plan.stage_memory import StageMemory

MIB = 2**20
GIB = 2**30


def make_stage(index: int, *, modules: tuple[str, ...] = (), peak_bytes: int = 5 * GIB, **fields: Any) -> StagePlan:
    memory = StageMemory(
        parameter_bytes=124 * MIB,
        buffer_bytes=fields.pop("buffer_bytes", 0),
        gradient_bytes=124 * MIB,
        optimizer_bytes=248 * MIB,
        activation_bytes=3 * GIB,
        transient_bytes=200 * MIB,
        peak_bytes=peak_bytes,
        capacity_bytes=fields.pop("capacity_bytes", None),
    )
    values = {
        "device": "cpu",
        "nodes": (f"h.{index}#0/add_0",),
        "parameters": 32_505_856,
        "forward_s": 0.0123,
        "backward_s": 0.025,
    }
    return StagePlan(index=index, modules=modules or (f"h.{index}",), memory=memory, **(values | fields))


def make_plan(**fields: Any) -> Plan:
    values = {
        "fingerprint": Fingerprint(model="GPT2LMHeadModel", state="5f", nodes="a0", torch="2.13.0"),
        "devices": ("cpu", "cpu"),
        "stages": (make_stage(0), make_stage(1)),
        "boundaries": (Boundary(value="h.0#0/add_0", producer=0, consumers=(1,), bytes=3 * MIB),),
        "chunks": 4,
        "microbatch_rows": (2, 2, 2, 2),
        "schedule": "1f1b",
        "optimizer": "adamw",
        "step_s": 0.187,
        "bubble": 0.2,
        "bottleneck_s": 0.0373,
        "lower_bound_s": 0.0373,
        "status": "optimal",
        "fits": True,
        "verdict": "fits",
        "class_flops": {"shared": 0.0, "micro": 1.0, "full": 0.0},
        "measured": True,
    }
    return Plan(**(values | fields))


def gpt2_plan() -> Plan:
    """A plan with everything in it: a tie, a skip, uneven microbatches, capacities, a gap, notes, a stage too large."""
    blocks = [f"transformer.h.{block}" for block in range(12)]
    stages = (
        make_stage(0, modules=("transformer.wte", "transformer.wpe", "transformer.drop", *blocks[:3])),
        make_stage(1, modules=(*blocks[3:6], "transformer.h.6.ln_1", "transformer.h.6.attn"), backward_s=0.0291),
        make_stage(
            2,
            modules=("transformer.h.6.mlp", *blocks[7:10]),
            peak_bytes=int(91.4 * GIB),
            recompute="block",
            buffer_bytes=4096,
        ),
        make_stage(3, modules=("lm_head", "transformer.ln_f", *blocks[10:]), parameters=768, forward_s=0.0000154),
    )
    stages = tuple(
        stage.model_copy(
            update={
                "device": f"cuda:{stage.index}",
                "memory": stage.memory.model_copy(update={"capacity_bytes": 80 * GIB}),
            }
        )
        for stage in stages
    )
    return make_plan(
        devices=tuple(stage.device for stage in stages),
        stages=stages,
        boundaries=(
            Boundary(value="input/input_ids", producer=-1, consumers=(0,), bytes=4096),
            Boundary(value="transformer.wte.weight", producer=0, consumers=(3,), bytes=147 * MIB, per_step=True),
            Boundary(value="transformer.h.2#0/add_3", producer=0, consumers=(1, 2, 3), bytes=3 * MIB),
            Boundary(
                value="transformer.h.6.attn.c_proj.extraordinarily.deep#0", producer=1, consumers=(2,), bytes=5120
            ),
            Boundary(value="transformer.h.9#0/add_3", producer=2, consumers=(3,), bytes=3 * MIB),
        ),
        chunks=8,
        microbatch_rows=(5, 5, 4, 4, 4, 4, 4, 4),
        bubble=0.2371,
        step_s=0.4502,
        bottleneck_s=0.0443,
        lower_bound_s=0.0431,
        status="bounded",
        fits=False,
        verdict="no",
        class_flops={"micro": 0.38, "full": 0.61, "shared": 0.01},
        measured=False,
        notes=("stage 3 issues faster than its host can: 12 of 40 launches wait, " * 2 + "so it is host-bound",),
    )
