"""A plan: the pinned, saved decision how a model runs over several devices."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from autosplit.checks import choose
from autosplit.errors import PlanError, ScheduleError
from autosplit.files import write_text
from autosplit.parallel import Parallel
from autosplit.planning.plan.decision import Decision, Prediction
from autosplit.planning.plan.diff import PlanDiff, diff, prefixes
from autosplit.planning.plan.export import export
from autosplit.planning.plan.fields import MeshDegrees
from autosplit.planning.plan.record import VERSION, PlanRecord
from autosplit.schedule.lists import Actions
from autosplit.schedule.order import Receives, step_order
from autosplit.schedule.stream import STALENESS, updates_behind

_NEAR = 3
"""How many names an error proposes."""
_WAY_OUT = "write one with plan.save(path)"
_REASONS = {"extra_forbidden": "there is no such field", "missing": "this field is missing"}
_OLD_ROWS = "actions"
"""What ``schedule_rows`` was called in older files."""
FITS = {"fits": True, "borderline": None, "no": False}


class _PlanHeader(BaseModel):
    """What every version of a plan has, read before the rest so that a foreign version is called that."""

    version: int


class Plan(PlanRecord):
    """Partition, schedule, chunks and prediction for one model; plain data that can be saved, read and re-applied."""

    @property
    def actions(self) -> Actions:
        """What every device does in a step, as it runs; ``print`` shows it in the form of torch's lowered schedules.

        Messages that only a loss takes, of stages before the last, are not known here.
        """
        schedule, sources = self.schedule_for(len(self.microbatch_rows)), [set[int]() for _ in self.stages]
        for boundary in self.boundaries:
            for consumer in boundary.consumers if boundary.producer >= 0 and not boundary.per_step else ():
                sources[consumer].add(boundary.producer)
        receives: Receives = "ahead" if self.processes or self.mesh is not None else "taken"
        lists = Actions.of(step_order(schedule, sources, receives=receives), len(schedule.lanes)).devices
        return Actions(tuple(map(self.parallel.entries, lists, schedule.marks or repeat(()))), receives)

    def on_ranks(self, parallel: Parallel) -> Plan:
        """Return the plan as that of ranks which share out so much beside the stages of a pipeline."""
        mesh = None if parallel == Parallel(pp=parallel.pp) else MeshDegrees(**asdict(parallel))
        return self.model_copy(update={"mesh": mesh})

    @property
    def parallel(self) -> Parallel:
        """The degrees of the mesh; without one those of a pipeline alone."""
        return Parallel(pp=len(self.devices)) if self.mesh is None else self.mesh.parallel

    @property
    def decision(self) -> Decision:
        """What was chosen, which a plan file pins."""
        return Decision.of(self)

    @property
    def prediction(self) -> Prediction:
        """What that is predicted to take; another one for other costs."""
        return Prediction.of(self)

    def export(self, form: str) -> str:
        """Return the plan as another tool's text.

        "torch-csv": the schedule as an action file that `torch.distributed.pipelining` reads, and ``schedule=`` too.
        "torchtitan": module names per stage, for ``module_fqns_per_model_part``; "torchtitan-toml": these with degrees,
        batch and recompute, as sections of a config. "megatron": the layout of blocks, for
        ``--pipeline-model-parallel-layout``; "megatron-args": that with degrees, batch and recompute, as arguments.
        Warns of blocks that the plan cuts inside, which these tools cannot.
        """
        return export(self, form)

    def move(self, moves: Mapping[str, int]) -> Plan:
        """Return the plan with modules in other stages: ``plan.move({"decoder.3": 1})``.

        Names are modules, with all that is in them, or nodes. Its figures stay as they are until it meets the model:
        see `edited`. Raises PlanError for a name or stage that is not there, and where a stage would have nothing left.
        """
        stage_of = self.stage_of()
        for name, target in moves.items():
            nodes = [node for node in stage_of if _lies_in(node, name)]
            if not nodes:
                raise PlanError(f"the plan has no module or node {name!r}{_meant(name, stage_of)}")
            if not 0 <= target < len(self.stages):
                raise PlanError(f"{name!r} cannot go to stage {target}: there are {len(self.stages)}, 0 on")
            stage_of.update(dict.fromkeys(nodes, target))
        stages = []
        for stage in self.stages:
            left = tuple(node for node, index in stage_of.items() if index == stage.index)
            if not left:
                raise PlanError(f"stage {stage.index} would have nothing left; leave every stage at least one module")
            paths = dict.fromkeys(node.partition("#")[0] or self.fingerprint.model for node in left)
            stages.append(stage.model_copy(update={"nodes": left, "modules": tuple(paths)}))
        return self.model_copy(update={"stages": tuple(stages)})

    def version_bytes(self, staleness: str) -> tuple[int, ...]:
        """Return the bytes of weights that a stream holds beside the newest, by stage, when the pipeline is full.

        They come on top of a peak that was planned for ``schedule="1f1b"`` with a minibatch of the stream, or a
        microbatch of it under "2bw", as microbatch.
        """
        choose("staleness", staleness, STALENESS)
        behind = updates_behind(staleness, [stage.replicas for stage in self.stages])
        return tuple(more * stage.memory.parameter_bytes for more, stage in zip(behind, self.stages, strict=True))

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
            version = _PlanHeader.model_validate_json(text).version
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


def _lies_in(node: str, name: str) -> bool:
    path = node.partition("#")[0]
    return node == name or path == name or path.startswith(f"{name}.")


def _meant(name: str, nodes: Iterable[str]) -> str:
    paths = dict.fromkeys(prefix for node in nodes for prefix in prefixes(node))
    near = difflib.get_close_matches(name, [*paths, *nodes], n=_NEAR, cutoff=0.5)
    return f"; the nearest: {', '.join(near)}" if near else ""


def _fields_of(text: str) -> str:
    """Return a plan's JSON without its computed fields; text that is not a JSON object is returned unchanged."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(data, dict) or data.keys().isdisjoint({*Plan.model_computed_fields, _OLD_ROWS}):
        return text
    names = {_OLD_ROWS: "schedule_rows"}
    return json.dumps({names.get(k, k): value for k, value in data.items() if k not in Plan.model_computed_fields})


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
    lanes = {stage.lane + replica for stage in plan.stages for replica in range(stage.replicas)}
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
    if plan.fits is not FITS[plan.verdict]:
        return f"verdict is {plan.verdict!r} and fits is {plan.fits}"
    if plan.curves and not plan.edited and not plan.curves_match(plan.schedule_for(len(plan.microbatch_rows))):
        return "its curves are not of its devices and their actions"
    return _wrong_figure(plan)


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
    """Return which figure cannot be one: a range from more to less."""
    for index, stage in enumerate(plan.stages):
        memory, where = stage.memory, f"stages.{index}.memory"
        if memory.low_bytes is not None and memory.high_bytes is not None and memory.low_bytes > memory.high_bytes:
            return f"{where}.low_bytes is {memory.low_bytes}, more than its high_bytes, {memory.high_bytes}"
    return None
