"""What a step takes behind its last action: what is left of the gradients' sums, and on a mesh the update.

```
    stage 0   gather │ … F B F B F B│ sum ···│ update │        what a stage's last backward does not hide is waited for
    stage 1   gather │   … B F B F B│ sum ···│ update │        an early stage ends last, and its sum too
```

The lists of a mesh have gathers, sums and updates where its runtime has them, and are simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import repeat

from autosplit.options import Options
from autosplit.parallel import buckets_of
from autosplit.planning.profiled.formulate import state_bytes
from autosplit.planning.profiled.specs import link_seconds
from autosplit.profile.types import Profile, StateProfile
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.entry import Entry, Send, Unshard, Update
from autosplit.schedule.memory.updates import HOSTED
from autosplit.schedule.order import lane_lists, with_updates
from autosplit.schedule.simulate import Timeline, TransferTime
from autosplit.schedule.simulate_lists import simulate_lists
from cost_models.collectives import BESIDE, Kind, group_of

_REACHED = 0.8
"""The part of a device's memory bandwidth that an update reaches: `cost_models.roofline`'s for optimizers."""

_HOST_STEP_S = 1e-10
"""Of CPUAdam per parameter, on all cores of a host: 1.0 s for 10 G (arXiv 2101.06840, table 4: recalled)."""


_SUMMED = 4
"""The bytes of an element of sums by programs that have them in bf16 or, as Megatron-LM's ``--bf16``, in fp32."""


def update_s(
    timeline: Timeline,
    transfers: Sequence[TransferTime],
    states: Mapping[int, Sequence[StateProfile]],
    options: Options,
) -> float:
    """Return how much longer a step takes than its actions; 0 in an evaluation.

    Replicas of stages sum their gradients in that time: none of it is hidden behind the stage's own work. On a mesh it
    is what its lists take longer.
    """
    schedule = timeline.schedule
    if not schedule.has_backward:
        return 0.0
    if options.placed is not None:
        lists = _RankLists(timeline, transfers, states, options)
        return max(0.0, lists.end_s - timeline.step_s) + lists.slower_s
    ends_s = [0.0] * schedule.stages
    for action, end_s in zip(schedule.issue_order, timeline.ends_s, strict=True):
        ends_s[action.stage] = max(end_s, ends_s[action.stage])
    sums_s = summed_s(schedule, states, options)
    if options.optimizer == HOSTED:
        sums_s = [sum_s + on_host_s(stage, schedule, states, options) for stage, sum_s in enumerate(sums_s)]
    return max(0.0, *(end_s + sum_s - timeline.step_s for end_s, sum_s in zip(ends_s, sums_s, strict=True)))


def on_host_s(stage: int, schedule: Schedule, states: Mapping[int, Sequence[StateProfile]], options: Options) -> float:
    """Return how long the host takes to update a stage: gradients come there, Adam steps, parameters go back.

    Nothing of it is hidden, and the devices of a host take their turns at its cores.
    """
    if options.machine is None:
        return 0.0
    part_of, device = options.parallel.part_of, options.machine.devices[schedule.stage_lane[stage]]
    trained = [state for state in states.get(stage, ()) if state.is_parameter and state.trainable]
    down = sum(part_of(options.parallel.kept_of(state), state, zero=2) for state in trained)
    up = sum(part_of(state.bytes, state, zero=1) for state in trained)
    stepped = max(options.machine.host_devices) * sum(part_of(state.elements, state, zero=1) for state in trained)
    return device.host_link.transfer_s(down) + stepped * _HOST_STEP_S + device.host_link.transfer_s(up)


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


class _RankLists:
    """The lists of a pipeline of a mesh, and how long their entries take."""

    def __init__(
        self,
        timeline: Timeline,
        transfers: Sequence[TransferTime],
        states: Mapping[int, Sequence[StateProfile]],
        options: Options,
    ) -> None:
        assert options.placed is not None
        self.timeline, self.states, self.options = timeline, states, options
        self.parallel, self.placed = options.parallel, options.placed
        self.sent_s = {(each.producer, each.consumer): (each.forward_s, each.backward_s) for each in transfers}

    @property
    def end_s(self) -> float:
        """When the last of them ends."""
        schedule = self.timeline.schedule
        sources = [{stage - 1} if stage else set[int]() for stage in range(schedule.stages)]
        for producer, consumer in self.sent_s:
            sources[consumer].add(producer)
        lists = map(self.parallel.entries, lane_lists(schedule, sources), schedule.marks or repeat(()))
        spans = simulate_lists(map(with_updates, lists), seconds=self._seconds, buckets_s=self.buckets_s)
        return max(span.end_s for device in spans for span in device)

    @cached_property
    def buckets_s(self) -> dict[int, list[float]]:
        """How long the sum of each bucket takes, by stage."""
        return {stage: self._buckets_s(stage) for stage in range(self.timeline.schedule.stages)}

    @property
    def slower_s(self) -> float:
        """How much longer the last backward of a stage takes beside its sums, at most."""
        if self.parallel.scatters or not self.sums_beside:
            return 0.0
        backward_s = self.timeline.seconds["B"]
        return max(BESIDE * min(sum(sums_s), backward_s[stage]) for stage, sums_s in self.buckets_s.items())

    def _seconds(self, entry: Entry) -> float:
        if isinstance(entry, Action):
            return self.timeline.seconds[entry.kind][entry.stage]
        if isinstance(entry, Send):
            source, target, _, _, backward = entry.route
            there_s, back_s = self.sent_s.get((target, source) if backward else (source, target), (0.0, 0.0))
            return back_s if backward else there_s
        if isinstance(entry, Unshard):
            return self._gathered_s(entry.stage)
        return self._updated_s(entry.stage) if isinstance(entry, Update) else 0.0

    @property
    def sums_beside(self) -> bool:
        """Whether gradients are added up beside the last backward, in buckets."""
        return not self.parallel.whole or self.parallel.rules.beside

    def _trained(self, stage: int) -> list[StateProfile]:
        return [state for state in self.states.get(stage, ()) if state.is_parameter and state.trainable]

    def _buckets_s(self, stage: int) -> list[float]:
        """Return how long the sum of each bucket takes, of the last parameters first; of shards each is one.

        Experts' gradients have buckets of their own.
        """
        parallel = self.parallel
        least = _SUMMED * parallel.rules.varies
        sizes: dict[int, list[int]] = {}
        for state in reversed(self._trained(stage)):
            size = max(parallel.sum_of(state), least * state.elements)
            sizes.setdefault(state.experts, []).append(size)
        if self.sums_beside:
            sizes = {at: [*buckets_of(each, bucket_bytes=parallel.rules.bucket_bytes)] for at, each in sizes.items()}
        kind: Kind = "reduce_scatter" if parallel.zero else "all_reduce"
        return [self.placed.summing(at).seconds(kind, size) for at, each in sizes.items() for size in each]

    def _gathered_s(self, stage: int) -> float:
        """Return how long the first forward waits for parameters: beside it they are gathered bucket by bucket.

        What is gathered block by block is waited for in the actions (`rank.with_gathers`).
        """
        if self.parallel.by_units:
            return 0.0
        held = [state for state in self.states.get(stage, ()) if state.is_parameter]
        counts = Counter[int]()
        for state in held if self.parallel.whole else self._trained(stage):
            counts[state.experts] += state.bytes
        hidden_s = self.timeline.seconds["F"][stage] if self.parallel.rules.beside else 0.0
        return max(0.0, sum(self.placed.summing(at).seconds("all_gather", n) for at, n in counts.items()) - hidden_s)

    def _updated_s(self, stage: int) -> float:
        """Return how long the optimizer takes to step a stage's parameters: as long as their bytes are moved."""
        assert self.options.machine is not None
        if self.options.optimizer == HOSTED:
            return on_host_s(stage, self.timeline.schedule, self.states, self.options)
        device = self.options.machine.devices[self.timeline.schedule.stage_lane[stage]]
        touched = 0
        for state in self._trained(stage):
            touched += (
                2 * self.parallel.part_of(state.bytes, state, zero=1) + 2 * state_bytes(state, self.options).optimizer
            )
        return touched / (_REACHED * device.memory_bandwidth_bytes_per_s)
