"""What a plan holds: partition, schedule, chunks and prediction for one model, as plain data: frozen, strict."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, computed_field

from autosplit.checks import OFFLOAD, OPTIMIZERS, PRECISIONS
from autosplit.planning.plan.fields import (
    Change,
    Count,
    FrozenFields,
    Generation,
    LaneCurve,
    MeshAlternative,
    MeshDegrees,
    Price,
    Seconds,
    Sensitivity,
    Size,
    Verdict,
)
from autosplit.planning.plan.stage_memory import StageMemory
from autosplit.schedule.action import Gradients, Schedule
from autosplit.schedule.files import schedule_of
from autosplit.trace.rows.findings import Proof


class StagePlan(FrozenFields):
    """One stage: its device, the stable names of its nodes in model order, its times per microbatch and its memory."""

    index: Count
    device: str
    lane: Count = Field(default_factory=lambda fields: fields["index"])
    """Index into the plan's devices, each of which is one lane; a file without it has one stage per device."""
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    """Qualified names of the modules in whose forward the stage's nodes run, in model order."""
    parameters: Size
    """Number of trainable and frozen parameter elements whose home is this stage."""
    trained: Size | None = None
    """Number of the trainable ones; older files have none."""
    forward_s: Seconds
    backward_s: Seconds
    recompute: Literal["never", "always", "except_last", "block"] = "never"
    """What the stage does again in its backward; ``backward_s`` counts that."""
    again_s: Seconds | None = None
    """How long that takes; older files have none, and all of the forward was done again."""
    gradients: Gradients = "all"
    """Of what its backward makes gradients; "none": it has no backward, as nothing up to it is trained."""
    weight_s: Seconds = 0.0
    """The part of ``backward_s`` that only weight gradients need: W of a backward in two parts."""
    forward_issue_s: Seconds = 0.0
    """How long a host thread takes to issue the kernels of one microbatch's forward; 0 where that is not known."""
    backward_issue_s: Seconds = 0.0
    """Likewise of its backward, with what is done again in it."""
    replicas: Count = Field(default=1, ge=1)
    """How many devices run the stage, from its lane on; they take microbatches in turn."""
    memory: StageMemory
    """That of the replica that holds the most."""


class Boundary(FrozenFields):
    """A value that crosses a cut: its producer stage (-1: a model input), its consumer stages, bytes per microbatch."""

    value: str
    producer: Count
    consumers: tuple[Count, ...]
    bytes: Size
    per_step: bool = False
    """Sent once per step (a shared value or a tied parameter), not once per microbatch."""


class Fingerprint(FrozenFields):
    """What a plan was made for."""

    model: str
    """Class name of the model."""
    state: str
    """Hash over ``entries``."""
    nodes: str
    """Hash over the stable node names of the recording that was planned."""
    torch: str
    entries: tuple[str, ...] = ()
    """Name and shape of every parameter and buffer, ``layer.weight[4, 3]``, sorted; older files have none."""
    choices: str | None = None
    """Hash over what the plan chose, so that an edit of that shows; older files have none."""


class Transfer(FrozenFields):
    """How long one microbatch's values between two stages travel, and their gradients back."""

    producer: Count
    consumer: Count
    forward_s: Seconds
    backward_s: Seconds


class Unit(FrozenFields):
    """A run of nodes of one module in model order, the smallest that is moved by hand, and its costs per microbatch.

    ``static_bytes`` are parameters, gradients, buffers and optimizer state; ``kept_bytes`` are what it keeps from its
    forward to its backward without recompute; ``transient_bytes`` live inside it only; ``sent_bytes`` is what crosses a
    cut behind it.
    """

    name: str
    stage: Count
    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    static_bytes: Count
    kept_bytes: Count
    transient_bytes: Count
    sent_bytes: Count
    block: Count | None = None
    """Units of one number are recomputed together under "block"; None is a block of its own."""


class Alternative(FrozenFields):
    """Another plan that the search weighed: what it chose, its step and its largest peak."""

    chunks: Count
    schedule: str
    virtual_stages: Count
    replicas: tuple[Count, ...] = ()
    recompute: tuple[str, ...]
    """One entry, or one per stage."""
    step_s: Seconds
    peak_bytes: Size
    """The largest of any device."""
    verdict: Verdict
    replayed: bool
    """Whether the peak was replayed, or is the additive formula's."""

    @property
    def choice(self) -> tuple[object, ...]:
        """What was chosen, as a key: of another plan that chose the same it is equal."""
        return self.chunks, self.schedule, self.virtual_stages, self.replicas, recompute_of(self.recompute)


def recompute_of(stages: Sequence[str]) -> tuple[str, ...]:
    """Return what stages recompute, once where all do the same."""
    return tuple(stages if len(set(stages)) > 1 else stages[:1])


VERSION = 1
MOST_CHUNKS = 2**16
"""More microbatches than this are no plan that anybody could follow."""


class PlanRecord(FrozenFields):
    """The data of a plan, and properties derived from it; `Plan` adds the methods that act on it."""

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
    schedule_rows: tuple[tuple[str, ...], ...] = ()
    """A schedule of the caller's own, lane by lane, in text form; empty where ``schedule`` is one of autosplit's."""
    optimizer: Annotated[str, Field(pattern=rf"^({'|'.join(OPTIMIZERS)}|[0-9]+)$")]
    """Its name, or its bytes of state per parameter element."""
    offload: tuple[Annotated[str, Field(pattern=rf"^({'|'.join(OFFLOAD)})$")], ...] = ()
    """What lies on the host between its uses, on paper; older files name the optimizer alone."""
    step_s: Seconds
    step_low_s: Seconds | None = None
    step_high_s: Seconds | None = None
    """Between what times the step may come out; None where that is not known."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """What the step hangs on."""
    overhead_s: Seconds = 0.0
    """The part of ``step_s`` that is no work of the model: the runtime's, and lanes that share the host's memory."""
    bubble: Annotated[float, Field(ge=-1e-9, le=1 + 1e-9)]
    bottleneck_s: Seconds
    lower_bound_s: Seconds
    status: Literal["optimal", "bounded"]
    objective: Literal["bottleneck", "step_time"] = "bottleneck"
    """What the cut makes least: ``bottleneck_s`` or ``step_s``.

    ``lower_bound_s`` bounds it over all cuts for the same devices, schedule and chunks that recompute at least as much
    as the stage that recomputes least; another schedule, other chunks or less recompute may be faster.
    """
    fits: bool | None
    verdict: Verdict
    class_flops: dict[str, float]
    """Share of the forward FLOPs in each node class."""
    measured: bool
    lora: str | None = None
    """The adapters that were planned for, in text form; None: none, or the model's own."""
    base: str | None = None
    """How frozen linear weights are kept ("nf4", "int8"); None: as they are."""
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
    precision: Annotated[str, Field(pattern=rf"^({'|'.join(PRECISIONS)})$")] | None = None
    """The precision that costs were predicted for; None: the model's own."""
    issue_threads: Count = Field(default=1, ge=1)
    """How many host threads issue the devices' kernels, each an equal part of them."""
    mesh: MeshDegrees | None = None
    """The mesh whose ranks share the model; stages, rows and bytes are then those of one rank.

    Of a pipe on a mesh, its own: what ranks gather and sum up is in ``actions``, bytes and times are without it.
    """
    meshes: tuple[MeshAlternative, ...] = ()
    """Other degrees that the search weighed, the fastest first."""
    update_s: Seconds = 0.0
    """The part of ``step_s`` in which ranks or replicas sum what is left of gradients, and a mesh's ranks update."""
    price: Price | None = None
    processes: bool = False
    """Whether each device has a process of its own, as under torchrun, whose thread issues its kernels."""
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
    generation: Generation | None = None
    """Of a plan for generating text: the plan is of the prompts, this of the new tokens."""
    reasons: tuple[str, ...] = ()
    """Why the plan is as it is, in words."""
    proofs: tuple[Proof, ...] = ()
    """What was proved of the recording that was planned: a call that records the same is not proved again."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def parameters(self) -> int:
        """Number of parameter elements."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def frozen(self) -> int:
        """Number of parameter elements that are not trained; 0 in older files."""
        return sum(0 if stage.trained is None else stage.parameters - stage.trained for stage in self.stages)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def rows_per_s(self) -> float | None:
        """Rows of the batch per second of the step; of a mesh all replicas'."""
        dp = 1 if self.mesh is None else self.mesh.dp
        return dp * sum(self.microbatch_rows) / self.step_s if self.step_s else None

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

    @computed_field  # type: ignore[prop-decorator]
    @property
    def odds(self) -> float | None:
        """The chance that every device has the room: that of the likeliest to lack it, as what is unknown is common."""
        return min((odds for stage in self.stages if (odds := stage.memory.odds) is not None), default=None)

    def stage_of(self) -> dict[str, int]:
        """Map stable node names to stage numbers."""
        return {name: stage.index for stage in self.stages for name in stage.nodes}

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the schedule of a step with so many microbatches: of `whole_schedule` what makes gradients."""
        return self.whole_schedule(microbatches).needed([stage.gradients for stage in self.stages])

    def whole_schedule(self, microbatches: int) -> Schedule:
        """Return the legal schedule of a step with so many microbatches in which every stage has weights to train.

        Of a schedule of the caller's own the actions of further microbatches are left out; ScheduleError where there
        are more microbatches than it has.
        """
        return schedule_of(
            self.schedule,
            stages=len(self.stages),
            microbatches=microbatches,
            virtual_stages=self.virtual_stages,
            actions=self.schedule_rows,
            replicas=self.replicas,
        )

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many devices each stage has; empty where that is one each."""
        each = tuple(stage.replicas for stage in self.stages)
        return each if max(each, default=1) > 1 else ()

    @property
    def choices(self) -> str:
        """A hash over what was chosen: where each node runs, in which schedule, and what is recomputed."""
        chosen = {
            "stages": [[stage.lane, stage.recompute, sorted(stage.nodes)] for stage in self.stages],
            "chunks": self.chunks,
            "microbatch_rows": self.microbatch_rows,
            "schedule": [
                self.schedule,
                self.virtual_stages,
                self.schedule_rows,
                *[self.replicas][: bool(self.replicas)],
            ],
        }
        return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]

    @property
    def alternative(self) -> Alternative:
        """This plan as an `Alternative`, to compare with those that were not chosen."""
        return Alternative(
            chunks=self.chunks,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            replicas=self.replicas,
            recompute=recompute_of([stage.recompute for stage in self.stages]),
            step_s=self.step_s,
            peak_bytes=max(stage.memory.peak_bytes for stage in self.stages),
            verdict=self.verdict,
            replayed=True,
        )

    @property
    def edited(self) -> bool:
        """Whether stages, schedule or chunks were changed by hand, so that times and memory are those of before.

        `autosplit` and `plan`, given such a plan, check it on the model and cost it anew.
        """
        return self.fingerprint.choices not in (None, self.choices)

    def sealed(self) -> Self:
        """Return the plan that knows what it chose: a later edit of that shows."""
        return self.model_copy(update={"fingerprint": self.fingerprint.model_copy(update={"choices": self.choices})})

    def curves_match(self, schedule: Schedule) -> bool:
        """Tell whether there are the devices' bytes over a step of this schedule, an entry per action and one more."""
        lengths = [{len(values) for values in curve.kinds} for curve in self.curves]
        return lengths == [{len(lane) + 1} for lane in schedule.lanes]

    @property
    def gap(self) -> float:
        """By how much, relatively, a better cut could be better at most; infinite where no bound is known."""
        if self.status == "optimal":
            return 0.0
        value_s = self.step_s - self.overhead_s if self.objective == "step_time" else self.bottleneck_s
        return max(0.0, value_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else math.inf
