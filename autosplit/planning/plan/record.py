"""What a plan holds: partition, schedule, chunks and prediction for one model, as plain data."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, computed_field

from autosplit.planning.plan.parts import (
    Alternative,
    Boundary,
    Change,
    Count,
    Fingerprint,
    LaneCurve,
    Record,
    Seconds,
    StagePlan,
    Transfer,
    Unit,
)
from autosplit.planning.request.schedules import schedule_of
from autosplit.schedule.action import Schedule
from autosplit.trace.rows.findings import Proof

VERSION = 1
MOST_CHUNKS = 2**16
"""More microbatches than this are no plan that anybody could follow."""


class PlanRecord(Record):
    """What a plan holds, and what follows from that alone; `Plan` adds what is done with it."""

    version: int = VERSION
    fingerprint: Fingerprint
    devices: tuple[str, ...]
    """One entry per lane."""
    stages: tuple[StagePlan, ...]
    boundaries: tuple[Boundary, ...]
    chunks: Annotated[int, Field(ge=1, le=MOST_CHUNKS)]
    microbatch_rows: tuple[Annotated[int, Field(ge=1, le=2**60)], ...]
    """Rows of each microbatch of the batch that was planned for."""
    schedule: str
    virtual_stages: Count = Field(default=1, ge=1)
    """The most stages on one device."""
    actions: tuple[tuple[str, ...], ...] = ()
    """A schedule of the caller's own, lane by lane, in text form; empty where ``schedule`` is one of autosplit's."""
    optimizer: str
    step_s: Seconds
    overhead_s: Seconds = 0.0
    """The part of ``step_s`` that is no work of the model: the runtime's, and lanes that share the host's memory."""
    bubble: float
    bottleneck_s: Seconds
    lower_bound_s: Seconds
    status: Literal["optimal", "bounded"]
    objective: Literal["bottleneck", "step_time"] = "bottleneck"
    """What the cut makes least: ``bottleneck_s`` or ``step_s``.

    ``lower_bound_s`` bounds it over all cuts for the same devices, schedule and chunks that recompute at least as much
    as the stage that recomputes least; another schedule, other chunks or less recompute may be faster.
    """
    fits: bool | None
    verdict: Literal["fits", "borderline", "no"]
    class_flops: dict[str, float]
    """Share of the forward FLOPs in each node class."""
    measured: bool
    dtype: str | None = None
    """What most of the model's parameters are in; older files have none, as likewise the next three."""
    sequence: Count | None = None
    """Tokens of a row; None where no input is a table of integers."""
    model_flops: Annotated[float, Field(ge=0)] | None = None
    """Of the forwards and backwards of a step, without what is recomputed."""
    peak_flops_per_s: Annotated[float, Field(gt=0)] | None = None
    """Of all devices, by their data sheets, in the dtype of the arithmetic; None where there is no such rate."""
    notes: tuple[str, ...] = ()
    rung: Literal["recorded", "module tree"] = "recorded"
    """How the model was followed: its calls recorded, or its own Python run module by module."""
    whole: tuple[str, ...] = ()
    """Modules that are one node because their Python cannot be recorded: ``path: reason``."""
    precision: str | None = None
    """The precision that costs were predicted for; None: the model's own."""
    issue_threads: Count = Field(default=1, ge=1)
    """How many host threads issue the devices' kernels, each an equal part of them."""
    machine: str | None = None
    """The machine on paper that was planned for; None: devices that are there."""
    transfers: tuple[Transfer, ...] = ()
    """What travels between stages per microbatch, and how long."""
    units: tuple[Unit, ...] = ()
    """The model in pieces, in model order: what a cut moved by hand is costed with."""
    curves: tuple[LaneCurve, ...] = ()
    """What each device holds over the step; empty where the stages were not replayed, or a step is very long."""
    frontier: tuple[Alternative, ...] = ()
    """Of the plans that the search weighed those that none beats in both step and peak, the fastest first."""
    changes: tuple[Change, ...] = ()
    """Where the plan does not fit: what would, the cheapest first."""
    reasons: tuple[str, ...] = ()
    """Why the plan is as it is, in words."""
    proofs: tuple[Proof, ...] = ()
    """What was proved of the recording that was planned: a call that records the same is not proved again."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def parameters(self) -> int:
        """Number of parameter elements."""
        return sum(stage.parameters for stage in self.stages)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def rows_per_s(self) -> float | None:
        """Rows of the batch per second of the step."""
        return sum(self.microbatch_rows) / self.step_s if self.step_s else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the step; None where rows have no tokens."""
        return None if self.sequence is None or self.rows_per_s is None else self.sequence * self.rows_per_s

    @computed_field  # type: ignore[prop-decorator]
    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the model's FLOPs of a step over what the devices could do meanwhile."""
        if self.model_flops is None or self.peak_flops_per_s is None or not self.step_s:
            return None
        return self.model_flops / self.step_s / self.peak_flops_per_s

    def stage_of(self) -> dict[str, int]:
        """Map stable node names to stage numbers."""
        return {name: stage.index for stage in self.stages for name in stage.nodes}

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the legal schedule of a step with so many microbatches.

        Of a schedule of the caller's own the actions of further microbatches are left out; ScheduleError where there
        are more microbatches than it has.
        """
        return schedule_of(
            self.schedule,
            stages=len(self.stages),
            microbatches=microbatches,
            virtual_stages=self.virtual_stages,
            actions=self.actions,
        )

    @property
    def gap(self) -> float:
        """By how much, relatively, a better cut could be better at most; infinite where no bound is known."""
        if self.status == "optimal":
            return 0.0
        value_s = self.step_s - self.overhead_s if self.objective == "step_time" else self.bottleneck_s
        return max(0.0, value_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else math.inf
