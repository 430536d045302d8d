"""What a step takes beside its operations, by the figures of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from autosplit.options import Options
from autosplit.planning.plan.parts import StagePlan
from autosplit.planning.profiled.specs import device_specs
from autosplit.schedule.action import Schedule
from autosplit.schedule.simulate import Timeline
from cost_models.specs import StepAmounts


def overhead_s(options: Options, stages: Sequence[StagePlan], schedule: Schedule, timeline: Timeline) -> float:
    """Return the seconds that a simulated step takes longer than its actions and transfers: the slowest lane's.

    0 where nothing is known of the devices, and on paper, where no lane runs.
    """
    if options.machine is not None or options.lanes != "threads":
        return 0.0
    amounts = step_amounts(stages, schedule, timeline)
    known = [(spec.step, own) for spec, own in zip(device_specs(options), amounts, strict=False) if spec.step]
    return max((step.seconds(own) for step, own in known), default=0.0)


def step_amounts(stages: Sequence[StagePlan], schedule: Schedule, timeline: Timeline) -> list[StepAmounts]:
    """Return for each lane what `cost_models.specs.StepSpec` has a cost for.

    A lane works beside the others for as long as it works, times the share of the step in which another lane does.
    """
    sums = max(0, schedule.microbatches - 1) if schedule.has_backward else 0
    busy_s, found = [lane.busy_s for lane in timeline.lanes], []
    for lane, actions in enumerate(schedule.lanes):
        own = [stage.memory for stage in stages if stage.lane == lane]
        others = (len(busy_s) - 1) * timeline.step_s
        share = (sum(busy_s) - busy_s[lane]) / others if others else 0.0
        found.append(
            StepAmounts(
                steps=1,
                actions=len(actions),
                gradient_bytes=sums * sum(memory.gradient_bytes for memory in own),
                held_bytes=sum(memory.activation_bytes for memory in own),
                overlapped_s=busy_s[lane] * share,
            )
        )
    return found
