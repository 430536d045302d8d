"""A plan: the pinned, saved decision how a model runs over several devices."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, computed_field

from autosplit.checks import OPTIMIZER_COPIES, PRECISIONS
from autosplit.errors import PlanError, ScheduleError
from autosplit.planning.diff import PlanDiff, diff
from autosplit.planning.export import export
from autosplit.planning.moves import choices_of, moved
from autosplit.planning.records import (
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
from autosplit.planning.schedules import schedule_of
from autosplit.schedule.action import Schedule
from autosplit.trace.findings import Proof

VERSION = 1
MOST_CHUNKS = 2**16
"""More microbatches than this are no plan that anybody could follow."""
_NOT_NEGATIVE = tuple(
    f"{name}_bytes" for name in "parameter buffer gradient optimizer peak capacity reserve low high".split()
)
"""What a stage's memory has none less of; the rest may be differences."""
_DERIVED = ("parameters", "rows_per_s", "tokens_per_s", "mfu")
"""What the JSON of a plan says beside its fields."""
_WAY_OUT = "write one with plan.save(path)"
_REASONS = {"extra_forbidden": "there is no such field", "missing": "this field is missing"}
_FITS = {"fits": True, "borderline": None, "no": False}


class _Header(BaseModel):
    """What every version of a plan has, read before the rest so that a foreign version is called that."""

    version: int


class Plan(Record):
    """Partition, schedule, chunks and prediction for one model; plain data that can be saved, read and re-applied."""

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

    def export(self, form: str) -> str:
        """Return the plan as another tool's text.

        "torch-csv": the schedule as an action file that `torch.distributed.pipelining` reads, and ``schedule=`` too.
        "torchtitan": module names per stage, for ``module_fqns_per_model_part``. "megatron": the layout of blocks, for
        ``--pipeline-model-parallel-layout``. Warns of blocks that the plan cuts inside, which these two cannot.
        """
        return export(self, form)

    @property
    def edited(self) -> bool:
        """Whether stages, schedule or chunks were changed by hand, so that times and memory are those of before.

        `autosplit` and `plan`, given such a plan, check it on the model and cost it anew.
        """
        return self.fingerprint.choices not in (None, choices_of(self))

    def move(self, moves: Mapping[str, int]) -> Plan:
        """Return the plan with modules in other stages: ``plan.move({"decoder.3": 1})``.

        Names are modules, with all that is in them, or nodes. Its figures stay as they are until it meets the model:
        see `edited`. Raises PlanError for a name or stage that is not there, and where a stage would have nothing left.
        """
        return moved(self, moves)

    def diff(self, other: Plan) -> PlanDiff:
        """Return what differs from this plan in another: false where nothing does; ``print`` shows it."""
        return diff(self, other)

    @property
    def gap(self) -> float:
        """By how much, relatively, a better cut could be better at most; infinite where no bound is known."""
        if self.status == "optimal":
            return 0.0
        value_s = self.step_s - self.overhead_s if self.objective == "step_time" else self.bottleneck_s
        return max(0.0, value_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else math.inf

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return self.model_dump_json(indent=2)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **choices: Any) -> Plan:
        """Return the plan of a JSON text; what that derives from the fields is left out."""
        text = json_data if isinstance(json_data, str) else bytes(json_data).decode()
        return super().model_validate_json(_fields_of(text), **choices)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; raises PlanError when the file is missing, no plan, of another version or contradictory."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{str(path)!r} is no plan: it is no UTF-8 text; {_WAY_OUT}") from error
        try:
            version = _Header.model_validate_json(text).version
            if version != VERSION:
                raise PlanError(
                    f"{str(path)!r} is a plan of version {version}, this autosplit reads {VERSION}; plan again"
                )
            plan = cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            reason = _REASONS.get(first["type"], first["msg"])
            raise PlanError(
                f"{str(path)!r} is no plan: {where}: {reason} (problems in all: {error.error_count()}); {_WAY_OUT}"
            ) from error
        problem = _contradiction(plan)
        if problem is not None:
            raise PlanError(f"{str(path)!r} contradicts itself: {problem}; undo the edit, or plan again")
        return plan


def _fields_of(text: str) -> str:
    """Return a plan's JSON without what it derives from its fields; what is no JSON object as it is."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(data, dict) or data.keys().isdisjoint(_DERIVED):
        return text
    return json.dumps({name: value for name, value in data.items() if name not in _DERIVED})


def _contradiction(plan: Plan) -> str | None:
    """Return what an edit has broken between the parts of a plan, or None."""
    count = len(plan.stages)
    indices = [stage.index for stage in plan.stages]
    if not plan.stages or indices != list(range(count)):
        return f"its stages are numbered {indices}, not 0, 1, ... in this order"
    uses = Counter(name for stage in plan.stages for name in stage.nodes)
    repeated = next((name for name, number in uses.items() if number > 1), None)
    if repeated is not None:
        stages = [stage.index for stage in plan.stages if repeated in stage.nodes]
        return f"node {repeated!r} is listed {uses[repeated]} times, in stages {stages}"
    empty = next((stage.index for stage in plan.stages if not stage.nodes and plan.rung != "module tree"), None)
    if empty is not None:
        return f"stages.{empty}.nodes is empty; leave every stage at least one node"
    foreign = _foreign_stage(plan)
    if foreign is not None:
        return f"{foreign}, there are {count} stages"
    lanes = {stage.lane for stage in plan.stages}
    if lanes != set(range(len(plan.devices))):
        return f"its stages are on lanes {sorted(lanes)}, and there are {len(plan.devices)} devices"
    try:
        placed = plan.schedule_for(len(plan.microbatch_rows) or 1).stage_lane
    except ScheduleError as error:
        return str(error)
    if placed != tuple(stage.lane for stage in plan.stages):
        return f"schedule {plan.schedule!r} has its stages on lanes {list(placed)}"
    if not 1 <= len(plan.microbatch_rows) <= plan.chunks:
        return f"it has {len(plan.microbatch_rows)} microbatches for chunks={plan.chunks}"
    if plan.fits is not _FITS[plan.verdict]:
        return f"verdict is {plan.verdict!r} and fits is {plan.fits}"
    figure = _wrong_figure(plan)
    if figure is not None:
        return figure
    return None if plan.edited else _wrong_curve(plan)


def _foreign_stage(plan: Plan) -> str | None:
    """Return what names a stage that a plan does not have, or sends backwards."""
    stages = range(len(plan.stages))
    for boundary in plan.boundaries:
        for index in (boundary.producer, *boundary.consumers):
            if index not in stages and not (index == -1 and index == boundary.producer):
                return f"boundary {boundary.value!r} names stage {index}"
    for transfer in plan.transfers:
        if not 0 <= transfer.producer < transfer.consumer < len(stages):
            return f"a transfer goes from stage {transfer.producer} to {transfer.consumer}"
    unit = next((unit for unit in plan.units if unit.stage not in stages), None)
    return None if unit is None else f"unit {unit.name!r} is in stage {unit.stage}"


def _wrong_figure(plan: Plan) -> str | None:
    """Return which figure cannot be one: bytes below none, a range from more to less, words that nobody knows."""
    for index, stage in enumerate(plan.stages):
        memory, where = stage.memory, f"stages.{index}.memory"
        counts = {f"{where}.{name}": getattr(memory, name) for name in _NOT_NEGATIVE}
        counts[f"stages.{index}.parameters"] = stage.parameters
        below = next((name for name, count in counts.items() if (count or 0) < 0), None)
        if below is not None:
            return f"{below} is {counts[below]}, and cannot be below 0"
        if memory.low_bytes is not None and memory.high_bytes is not None and memory.low_bytes > memory.high_bytes:
            return f"{where}.low_bytes is {memory.low_bytes}, more than its high_bytes, {memory.high_bytes}"
    sent = next((place for place, boundary in enumerate(plan.boundaries) if boundary.bytes < 0), None)
    if sent is not None:
        return f"boundaries.{sent}.bytes is {plan.boundaries[sent].bytes}, and cannot be below 0"
    if not -1e-9 <= plan.bubble <= 1 + 1e-9:
        return f"bubble is {plan.bubble}, and is a share between 0 and 1"
    if plan.optimizer not in OPTIMIZER_COPIES and not (plan.optimizer.isascii() and plan.optimizer.isdecimal()):
        return f"optimizer is {plan.optimizer!r}, and is one of {', '.join(OPTIMIZER_COPIES)}, or a number of bytes"
    if plan.precision not in (None, *PRECISIONS):
        return f"precision is {plan.precision!r}, and is null or one of {', '.join(PRECISIONS)}"
    return None


def _wrong_curve(plan: Plan) -> str | None:
    """Return which device's bytes over the step are not of its actions."""
    if not plan.curves:
        return None
    lanes = plan.schedule_for(len(plan.microbatch_rows)).lanes
    if len(plan.curves) != len(lanes):
        return f"it has {len(plan.curves)} curves for {len(lanes)} devices"
    for lane, (curve, actions) in enumerate(zip(plan.curves, lanes, strict=True)):
        for name in type(curve).model_fields:
            if len(getattr(curve, name)) != len(actions) + 1:
                return f"curves.{lane}.{name} has {len(getattr(curve, name))} entries for {len(actions)} actions"
    return None
