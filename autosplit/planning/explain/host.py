"""The host on the clock: how long its threads issue a plan's kernels, and what the step is then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import StepTimeline, predicted_step_s, simulated
from autosplit.schedule.action import Kind
from autosplit.schedule.simulate import simulate

_WORTH = 1.05
"""The host binds where waiting for it makes a step so many times as long."""


@dataclass(frozen=True)
class HostStep:
    """A step whose kernels host threads issue, in the order of the schedule.

    Attributes:
        issue_s: how long each thread issues.
        devices_s: the step of devices that never wait for it.
        step_s: the step of devices that do.
    """

    issue_s: float
    devices_s: float
    step_s: float

    @property
    def binds(self) -> bool:
        """Whether the step is notably longer for it."""
        return self.step_s > _WORTH * self.devices_s


def host_step(plan: Plan) -> HostStep | None:
    """Return the step with the host's time; None where nothing is known of that, or lanes issue for themselves."""
    if not any(stage.forward_issue_s or stage.backward_issue_s for stage in plan.stages):
        return None
    there = [stage.forward_issue_s / plan.issue_threads for stage in plan.stages]
    back = [stage.backward_issue_s / plan.issue_threads for stage in plan.stages]
    split = [stage.weight_s / stage.backward_s if stage.backward_s else 0.0 for stage in plan.stages]
    issue: dict[Kind, list[float]] = {
        "F": there,
        "B": back,
        "I": [(1 - part) * whole for part, whole in zip(split, back, strict=True)],
        "W": [part * whole for part, whole in zip(split, back, strict=True)],
    }
    waiting = simulated(plan, partial(simulate, issue_s=issue))
    beside_s = plan.step_s - predicted_step_s(plan)
    return HostStep(waiting.host_s, plan.step_s, waiting.step_s + beside_s)


def with_measured_issue(plan: Plan, measured: StepTimeline) -> Plan | None:
    """Return the plan with the time that its host took to issue a recorded step, per microbatch; None without any.

    That is the least of a stage's microbatches: behind about a thousand launches CUDA's queue is full, and a host that
    waits for room there takes the device's time, which is none of its own.
    """
    took: dict[tuple[int, str, int], float] = {}
    for bar in measured.bars:
        if bar.issue_s is not None:
            took[bar.stage, bar.kind, bar.microbatch] = bar.issue_s
    if not took:
        return None
    stages = []
    for stage in plan.stages:
        cells = sorted({microbatch for index, _, microbatch in took if index == stage.index})
        there = [took.get((stage.index, "F", m), 0.0) for m in cells]
        back = [sum(took.get((stage.index, kind, m), 0.0) for kind in "BIW") for m in cells]
        stages.append(stage.model_copy(update={"forward_issue_s": _least(there), "backward_issue_s": _least(back)}))
    return plan.model_copy(update={"stages": tuple(stages), "issue_threads": 1})


def _least(times: Sequence[float]) -> float:
    """Return the least time that was taken; 0 where none was."""
    return min((seconds for seconds in times if seconds), default=0.0)
