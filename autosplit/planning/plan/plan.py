"""A plan: the pinned, saved decision how a model runs over several devices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from autosplit.checks import OPTIMIZER_COPIES, PRECISIONS
from autosplit.errors import PlanError, ScheduleError
from autosplit.files import write_text
from autosplit.planning.plan.diff import PlanDiff, diff
from autosplit.planning.plan.export import export
from autosplit.planning.plan.moves import choices_of, moved
from autosplit.planning.plan.record import VERSION, PlanRecord

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


class Plan(PlanRecord):
    """Partition, schedule, chunks and prediction for one model; plain data that can be saved, read and re-applied."""

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

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return self.model_dump_json(indent=2)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **choices: Any) -> Plan:
        """Return the plan of a JSON text; what that derives from the fields is left out."""
        text = json_data if isinstance(json_data, str) else bytes(json_data).decode()
        return super().model_validate_json(_fields_of(text), **choices)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a write that is cut off leaves a plan that was there as it is."""
        write_text(path, self.to_json() + "\n")

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
