"""A plan as two records: what was chosen, which its file pins, and what is predicted of that, which is made anew."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from autosplit.planning.plan.fields import MeshDegrees, Verdict
from autosplit.planning.plan.record import PlanRecord, StagePlan
from autosplit.planning.plan.stage_memory import StageMemory


class _PartOfPlan:
    """Some attributes of a plan, those of its stages by stage."""

    @classmethod
    def of(cls, plan: PlanRecord) -> Self:
        """Return those of a plan."""
        names, values = [field.name for field in fields(cls)], dict[str, Any]()  # type: ignore[arg-type]
        for name in names:
            by_stage = name in StagePlan.model_fields
            values[name] = tuple(getattr(s, name) for s in plan.stages) if by_stage else getattr(plan, name)
        return cls(**values)


@dataclass(frozen=True)
class Decision(_PartOfPlan):
    """What a plan chose.

    Attributes:
        nodes, lane, replicas, recompute: by stage, those of `StagePlan`. The others are the plan's.
    """

    nodes: tuple[tuple[str, ...], ...]
    lane: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: tuple[str, ...]
    devices: tuple[str, ...]
    schedule: str
    virtual_stages: int
    schedule_rows: tuple[tuple[str, ...], ...]
    chunks: int
    microbatch_rows: tuple[int, ...]
    mesh: MeshDegrees | None


@dataclass(frozen=True)
class Prediction(_PartOfPlan):
    """What that is predicted to take, in seconds and bytes.

    Attributes:
        forward_s, backward_s, memory: by stage, those of `StagePlan`. The others are the plan's.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    step_s: float
    update_s: float
    overhead_s: float
    bubble: float
    verdict: Verdict
    fits: bool | None
