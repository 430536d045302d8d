"""What a step takes behind its last action on a mesh: the rest of the gradients' sum, the update, the parameters back.

```
    stage 0   … F B F B F B│ sum ···│ update │ gather          what a stage's last backward does not hide is waited for
    stage 1   … B F B F B│ sum ···│ update │ gather            an early stage ends last, and its sum too
```

Gradients are summed in buckets beside the backward of the last microbatch, the last bucket behind it. Parameters that
were updated in shards are gathered beside the first forward of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosplit.options import Options
from autosplit.parallel import BUCKET_BYTES
from autosplit.planning.profiled.formulate import state_bytes
from autosplit.planning.profiled.specs import link_seconds
from autosplit.profile.types import Profile, StateProfile
from autosplit.schedule.action import Schedule
from autosplit.schedule.simulate import Timeline
from cost_models.collectives import group_of

_REACHED = 0.8
"""The part of a device's memory bandwidth that an update reaches: `cost_models.roofline`'s for optimizers."""


def update_s(timeline: Timeline, states: Mapping[int, Sequence[StateProfile]], options: Options) -> float:
    """Return how long after the last action all ranks are done; 0 without a mesh, and in an evaluation.

    Replicas of stages sum their gradients in that time: none of it is hidden behind the stage's own work.
    """
    if not timeline.schedule.has_backward:
        return 0.0
    schedule, ends_s = timeline.schedule, [0.0] * timeline.schedule.stages
    for action, end_s in zip(schedule.issue_order, timeline.ends_s, strict=True):
        ends_s[action.stage] = max(end_s, ends_s[action.stage])
    if options.placed is None:
        sums_s = summed_s(schedule, states, options)
        return max(0.0, *(end_s + sum_s - timeline.step_s for end_s, sum_s in zip(ends_s, sums_s, strict=True)))
    done_s = []
    for lane in sorted(set(schedule.stage_lane)):
        stages = schedule.stages_on(lane)
        hidden_s = [sum(timeline.seconds[kind][stage] for stage in stages) for kind in ("F", "B")]
        trained = [s for stage in stages for s in states.get(stage, ()) if s.is_parameter and s.trainable]
        done_s.append(max(ends_s[stage] for stage in stages) + _behind_s(trained, options, lane, hidden_s=hidden_s))
    return max(0.0, max(done_s) - timeline.step_s)


def summed_s(schedule: Schedule, states: Mapping[int, Sequence[StateProfile]], options: Options) -> list[float]:
    """Return the seconds in which the replicas of each stage sum its gradients; 0 for a single replica.

    Processes exchange their gradients, so that all of them add in the same order.
    """
    if not schedule.replicas or (options.machine is None and not options.processes):
        return [0.0] * schedule.stages
    sums = []
    for stage in range(schedule.stages):
        lanes = schedule.lanes_of(stage)
        count = sum(state_bytes(state, options).gradient for state in states.get(stage, ()))
        if options.machine is None:
            sums.append((len(lanes) - 1) * link_seconds(options, count) if count else 0.0)
        else:
            sums.append(group_of(options.machine, lanes).seconds("all_reduce", count))
    return sums


def cut_summed_s(schedule: Schedule, costs: Profile, stage_of: Mapping[str, int], options: Options) -> float:
    """Return how long the stage of a cut sums gradients whose replicas take longest for that."""
    states: dict[int, list[StateProfile]] = {}
    for state in costs.state.values() if schedule.replicas else ():
        states.setdefault(min((stage_of[name] for name in state.uses), default=0), []).append(state)
    return max(summed_s(schedule, states, options))


def _behind_s(trained: Sequence[StateProfile], options: Options, lane: int, *, hidden_s: Sequence[float]) -> float:
    """Return the seconds that one device works after its last action, beside ``hidden_s`` of a forward and backward."""
    assert options.placed is not None
    assert options.machine is not None
    group, zero = options.placed.dp, options.placed.parallel.zero
    count = sum(state.bytes for state in trained)
    sum_s = gather_s = 0.0
    if zero < 2 and count:
        whole_s = group.seconds("reduce_scatter" if zero else "all_reduce", count)
        sum_s = max(whole_s - hidden_s[1], whole_s * min(1.0, BUCKET_BYTES / count))
    if zero in (1, 2):
        gather_s = max(0.0, group.seconds("all_gather", count) - hidden_s[0])
    bandwidth = _REACHED * options.machine.devices[lane].memory_bandwidth_bytes_per_s
    touched = 0
    for state in trained:
        size = state_bytes(state, options)
        share = options.parallel.part_of(state.bytes, zero=1)
        touched += 2 * share + 2 * size.optimizer
    return sum_s + touched / bandwidth + gather_s
