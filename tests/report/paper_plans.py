"""Plans written by hand, with all that a page shows: units, transfers, curves, alternatives, changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autosplit.planning.plan.fields import Change
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import (
    Alternative,
    Boundary,
    Fingerprint,
    LaneCurve,
    StageMemory,
    StagePlan,
    Transfer,
    Unit,
)
from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import Timeline, TransferTime, simulate

MIB = 2**20
GIB = 2**30
LINK_BYTES_PER_S = 25e9


def make_units(count: int, *, stages: int) -> tuple[Unit, ...]:
    """Units of a transformer-like model: an embedding, blocks that differ a little, a head; evenly over the stages."""
    names = ["embed", *(f"layers.{index}" for index in range(count - 2)), "head"]
    return tuple(
        Unit(
            name=name,
            stage=index * stages // count,
            forward_s=(0.0002 if name == "embed" else 0.0011 + 0.0001 * (index * 7 % 5)),
            backward_s=(0.0004 if name == "embed" else 0.0023 + 0.0002 * (index * 5 % 3)),
            weight_s=0.0001 if name == "embed" else 0.0010,
            static_bytes=(2000 if name in ("embed", "head") else 900) * MIB,
            kept_bytes=(40 if name == "embed" else 350 + 30 * (index % 4)) * MIB,
            transient_bytes=(10 + 25 * (index % 3)) * MIB,
            sent_bytes=(16 + 8 * (index % 2)) * MIB,
        )
        for index, name in enumerate(names)
    )


def own(units: Sequence[Unit], stage: int) -> list[Unit]:
    return [unit for unit in units if unit.stage == stage]


def curve_of(units: Sequence[Unit], schedule: Schedule, lane: int) -> LaneCurve:
    """A lane's bytes by the additive formula, counted anew: what every microbatch in flight keeps, a transient."""
    places = [stage for stage, place in enumerate(schedule.stage_lane) if place == lane]
    static = sum(unit.static_bytes for stage in places for unit in own(units, stage))
    held: set[tuple[int, int]] = set()
    activations, transients = [], []
    for action in schedule.lanes[lane]:
        held.add((action.stage, action.microbatch))
        activations.append(sum(unit.kept_bytes for stage, _ in held for unit in own(units, stage)))
        transients.append(max(unit.transient_bytes for unit in own(units, action.stage)))
        if action.kind in "BW" or not schedule.has_backward:
            held.discard((action.stage, action.microbatch))
    moments = len(activations) + 1
    return LaneCurve(
        parameter_bytes=(static // 4,) * moments,
        gradient_bytes=(static // 4,) * moments,
        optimizer_bytes=(static - 2 * (static // 4),) * moments,
        activation_bytes=(*activations, 0),
        transient_bytes=(*transients, 0),
    )


def _memory(units: Sequence[Unit], curve: LaneCurve, stage: int, *, first: bool, capacity_bytes: int) -> StageMemory:
    totals = [sum(moment) for moment in zip(*curve.model_dump().values(), strict=True)]
    peak = max(totals)
    at = totals.index(peak)
    static = sum(unit.static_bytes for unit in own(units, stage))
    # What microbatches keep is written down with the device's first stage.
    share = 1 if first else 0
    return StageMemory(
        parameter_bytes=static // 4,
        buffer_bytes=0,
        gradient_bytes=static // 4,
        optimizer_bytes=static - 2 * (static // 4),
        activation_bytes=share * curve.activation_bytes[at],
        transient_bytes=share * curve.transient_bytes[at],
        peak_bytes=peak,
        capacity_bytes=capacity_bytes,
        low_bytes=int(0.97 * peak),
        high_bytes=int(1.06 * peak),
    )


def _rows(
    units: Sequence[Unit], order: Schedule, curves: Sequence[LaneCurve], *, capacity_bytes: int
) -> list[StagePlan]:
    return [
        StagePlan(
            index=stage,
            device=f"cuda:{order.stage_lane[stage]}",
            lane=order.stage_lane[stage],
            nodes=tuple(f"{unit.name}#0/linear_0" for unit in own(units, stage)),
            modules=tuple(unit.name for unit in own(units, stage)),
            parameters=1_000_000 * (stage + 1),
            forward_s=sum(unit.forward_s for unit in own(units, stage)),
            backward_s=sum(unit.backward_s for unit in own(units, stage)),
            weight_s=sum(unit.weight_s for unit in own(units, stage)),
            memory=_memory(
                units,
                curves[order.stage_lane[stage]],
                stage,
                first=order.stage_lane.index(order.stage_lane[stage]) == stage,
                capacity_bytes=capacity_bytes,
            ),
        )
        for stage in range(order.stages)
    ]


def _timeline(order: Schedule, rows: Sequence[StagePlan], times: Sequence[TransferTime]) -> Timeline:
    return simulate(
        order,
        forward_s=[row.forward_s for row in rows],
        backward_s=[row.backward_s for row in rows],
        input_gradient_s=[row.backward_s - row.weight_s for row in rows],
        weight_gradient_s=[row.weight_s for row in rows],
        transfers=tuple(times),
    )


def paper_plan(
    units: Sequence[Unit] | None = None,
    *,
    stages: int = 4,
    microbatches: int = 8,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    capacity_bytes: int = 24 * GIB,
    **fields: Any,
) -> Plan:
    """A plan whose every number follows from its units, so that one with other cuts can be made anew."""
    units = make_units(6 * stages, stages=stages) if units is None else tuple(units)
    order = build(schedule, stages=stages, microbatches=microbatches, virtual_stages=virtual_stages)
    curves = [curve_of(units, order, lane) for lane in range(len(order.lanes))]
    rows = _rows(units, order, curves, capacity_bytes=capacity_bytes)
    sent = [own(units, stage)[-1].sent_bytes for stage in range(stages - 1)]
    times = [
        TransferTime(stage, stage + 1, size / LINK_BYTES_PER_S, size / LINK_BYTES_PER_S)
        for stage, size in enumerate(sent)
    ]
    timeline = _timeline(order, rows, times)
    loads = [0.0] * len(order.lanes)
    for row in rows:
        loads[row.lane] += row.forward_s + row.backward_s
    values = {
        "fingerprint": Fingerprint(model="LlamaForCausalLM", state="5f", nodes="a0", torch="2.13.0"),
        "devices": tuple(f"cuda:{lane}" for lane in range(len(order.lanes))),
        "stages": tuple(rows),
        "boundaries": tuple(
            Boundary(value=f"{own(units, stage)[-1].name}#0/add_1", producer=stage, consumers=(stage + 1,), bytes=size)
            for stage, size in enumerate(sent)
        ),
        "chunks": microbatches,
        "microbatch_rows": (2,) * microbatches,
        "schedule": schedule,
        "virtual_stages": virtual_stages,
        "optimizer": "adamw",
        "step_s": timeline.step_s + 0.002,
        "bubble": timeline.bubble,
        "bottleneck_s": max(loads),
        "lower_bound_s": 0.98 * timeline.step_s,
        "status": "bounded",
        "objective": "step_time",
        "fits": True,
        "verdict": "fits",
        "class_flops": {"shared": 0.0, "micro": 1.0, "full": 0.0},
        "measured": False,
        "precision": "bf16",
        "transfers": tuple(
            Transfer(producer=t.producer, consumer=t.consumer, forward_s=t.forward_s, backward_s=t.backward_s)
            for t in times
        ),
        "units": units,
        "curves": tuple(curves),
    }
    return Plan(**(values | fields))


def with_cuts(plan: Plan, stages: Sequence[int]) -> Plan:
    """The plan made anew with unit ``i`` in stage ``stages[i]``."""
    units = [unit.model_copy(update={"stage": stage}) for unit, stage in zip(plan.units, stages, strict=True)]
    return paper_plan(
        units,
        stages=len(plan.stages),
        microbatches=len(plan.microbatch_rows),
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
    )


def searched(plan: Plan) -> Plan:
    """The plan with what a search and its advice leave behind."""
    peak = max(stage.memory.peak_bytes for stage in plan.stages)

    def other(chunks: int, schedule: str, recompute: str, step: float, size: float, verdict: str) -> Alternative:
        return Alternative(
            chunks=chunks,
            schedule=schedule,
            virtual_stages=2 if schedule == "interleaved" else 1,
            recompute=(recompute,),
            step_s=step * plan.step_s,
            peak_bytes=int(size * peak),
            verdict=verdict,
            replayed=recompute != "always",
        )

    first = Alternative(
        chunks=plan.chunks,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        recompute=("never",),
        step_s=plan.step_s,
        peak_bytes=peak,
        verdict=plan.verdict,
        replayed=True,
    )
    return plan.model_copy(
        update={
            "frontier": (
                other(plan.chunks * 2, "interleaved", "never", 0.93, 1.31, "no"),
                other(plan.chunks * 2, "zb_h1", "never", 0.96, 1.12, "borderline"),
                first,
                other(plan.chunks, "1f1b", "except_last", 1.09, 0.93, "fits"),
                other(plan.chunks, "1f1b", "block", 1.18, 0.71, "fits"),
                other(plan.chunks // 2, "gpipe", "always", 1.34, 0.64, "fits"),
            ),
            "changes": (
                Change(
                    kind="recompute",
                    text='recompute="block": 17.2 GiB, the step is 18% longer',
                    arguments={"recompute": "block"},
                    step_s=1.18 * plan.step_s,
                    peak_bytes=int(0.71 * peak),
                    verdict="fits",
                ),
            ),
            "reasons": (
                "recompute on stages 0-1 costs 11% and saves 34 GiB",
                "1f1b holds fewer microbatches than gpipe",
            ),
            "notes": ("2 random operations draw per microbatch from seeded generators",),
        }
    )
