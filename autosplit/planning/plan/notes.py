"""What has to be said of a plan: what its numbers leave out, and where plain execution is the better choice."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from autosplit.options import Options
from autosplit.partition.checker import check
from autosplit.partition.problem import Problem, Work
from autosplit.partition.solve import Partition
from autosplit.planning.profiled.offload import saved_by_block
from autosplit.planning.profiled.problem import ProfiledProblem
from autosplit.planning.profiled.specs import notes_on_unknown
from autosplit.profile.types import Profile
from autosplit.schedule.action import Schedule
from autosplit.trace.borrowed import side_effects
from autosplit.trace.graph import NodeClass
from autosplit.trace.recording.draw_rules import with_plain_numbers
from autosplit.trace.reductions.own_loss import note_on_loss
from autosplit.trace.rows.kinds import norm_notes
from autosplit.units import format_bytes, plural

PLAIN_ON_TWO = (1.74, 1.83)
"""How many times as fast as on one thread plain training steps were on two idle cores: conv net, transformer, MLP."""


_LITTLE, _LESS, _FULL = 1 / 3, 0.8, 0.9
"""Parts of the longest load: less is little to do, and less for want of room on a device that is so full."""


def notes_of(
    case: ProfiledProblem, partition: Partition, peaks: Sequence[int], *, unreplayed: str | None
) -> Iterator[str]:
    """Yield what has to be said of a plan with these peaks; ``unreplayed`` is why they are the formula's, or None."""
    traced, costs, options = case.recorded.trace.graph, case.costs, case.options
    infos = [info for _, info in traced.compute_nodes()]
    if (nothing := note_on_training(costs, case.problem.schedule)) is not None:
        yield nothing
    if traced.min_rows > 1:
        yield "one row alone behaves differently in this model: microbatches have at least two rows"
    yield from norm_notes(traced)
    if traced.changed:
        yield side_effects.words(traced.changed)
    plain = {info.name for info in with_plain_numbers(infos)} if options.rng == "plain" else set()
    random = [info.name for info in infos if info.random and info.name not in plain]
    if random:
        yield (
            f"{len(random)} random operations draw per microbatch from seeded generators, other numbers than the "
            f"plain model's (first: {random[0]})"
        )
    full = [i.name for i in infos if i.node_class is NodeClass.FULL]
    if full:
        yield (
            f"{len(full)} operation{'s mix' if len(full) > 1 else ' mixes'} rows: once per step, on the whole "
            "batch, on the last device "
            f"(first: {full[0]})"
        )
        if (loss := note_on_loss(traced)) is not None:
            yield loss
    yield from advice(case.problem, partition, options, measured=costs.measured)
    yield from idle(case, partition, peaks)
    if "activations" in options.offload:
        count = sum(saved_by_block(case.whole, case.recorded.outline.blocks).values())
        yield (
            f"blocks copy {format_bytes(count)} of each microbatch to the hosts and back, beside their work; autosplit "
            "does not run that: torch's save_on_cpu and torchtune do"
        )
    if unreplayed is not None:
        yield f"peaks are by the additive formula, not replayed: {unreplayed}"
    if costs.estimated:
        name, why = next(iter(costs.estimated.items()))
        yield f"costs of {len(costs.estimated)} operations are estimates (first: {name}: {why})"
    if short := costs.times.out_of_memory:
        name, why = next(iter(short.items()))
        yield f"times of {len(short)} operations are modelled (first: {name}: {why})"
    elif options.measure and options.kernels == "cuda" and not costs.measured:
        device = options.devices[options.leading]
        yield (
            f"times are those of {costs.times.device} by its data sheet: nothing was measured on {device}; where the "
            "model lies there while it is planned, it is"
        )
    yield from notes_on_unknown(options)


def advice(problem: Problem, partition: Partition, options: Options, *, measured: bool) -> Iterator[str]:
    """Say when lanes have to share cores, and when the plan is predicted below what plain execution reached on two.

    Nothing is said of times that were not measured, which is on one thread.
    """
    if not measured or any(device.type != "cpu" for device in options.devices) or problem.schedule == "forward":
        return
    cores, lanes = _cores(), len(set(partition.costs.lane))
    if lanes > cores:
        yield f"{lanes} lanes share {cores} cores of this machine: the predicted step is for a core per lane"
    alone_s = problem.microbatches * sum(work.forward_s + work.backward_s for work in problem.works)
    step_s = partition.costs.step_s
    faster = min(alone_s / step_s if step_s else 1.0, cores)
    if cores > 1 and lanes > 1 and faster < PLAIN_ON_TWO[0]:
        yield (
            "plain execution is likely the better choice on this CPU where the model fits: the plan is predicted to be "
            f"{faster:.2f} times as fast as one thread; plain PyTorch on two threads was {PLAIN_ON_TWO[0]} to "
            f"{PLAIN_ON_TWO[1]} times as fast in reference measurements of other models; this one's was not measured"
        )


def idle(case: ProfiledProblem, partition: Partition, peaks: Sequence[int]) -> Iterator[str]:
    """Say which devices have little or nothing to do, how long they stand idle, and why."""
    problem, costs, busy_s = case.problem, partition.costs, partition.costs.timeline.busy_s
    count, used, step_s = problem.microbatches, len(busy_s), costs.step_s
    if case.warning is not None:
        yield case.warning
    if not step_s or problem.devices is None:
        return
    if count < used and problem.custom_schedule is None:
        more = replace(problem, microbatches=4 * used)
        each_s = check(more, partition.assignment, recompute=costs.recompute).step_s / (4 * used)
        yield (
            f"{plural(count, 'microbatch')} at work on {used} devices: these are idle {costs.timeline.bubble:.0%} of "
            f"the step; of {4 * used} such microbatches (a larger batch, or accumulated) each would take "
            f"{1 - each_s * count / step_s:.0%} less"
        )
    longest = max(range(used), key=lambda lane: busy_s[lane])
    for lane, (load_s, device) in enumerate(zip(busy_s, problem.devices, strict=False)):
        capacity = case.options.capacity_bytes(lane)
        full = capacity is not None and peaks[lane] > _FULL * capacity
        if load_s >= (_LESS if full else _LITTLE) * busy_s[longest]:
            continue
        times = device.slowdown / min(other.slowdown for other in problem.devices)
        if full and capacity is not None:
            why = f"it is full, {format_bytes(peaks[lane])} of {format_bytes(capacity)}"
        elif times > 1 / _LITTLE:
            why = f"it takes {times:.3g} times as long as the fastest for the same work"
        else:
            largest_s, largest = _largest(problem, partition, longest)
            share = count * largest_s / busy_s[longest]
            why = f"{largest!r} alone is {share:.0%} of what the busiest, device {longest}, does"
        which = f"device {lane} ({case.options.device_name(lane)})"
        yield f"{which} is idle {1 - load_s / step_s:.0%} of the step: {why}"


def _largest(problem: Problem, partition: Partition, lane: int) -> tuple[float, str]:
    """Return the seconds and the name of a device's largest block, or work of none."""
    slow = problem.devices[lane].slowdown if problem.devices else 1.0
    members: dict[Hashable, list[Work]] = {}
    for work, stage in zip(problem.works, partition.assignment, strict=True):
        if partition.costs.lane[stage] == lane:
            members.setdefault(work.name if work.block is None else work.block, []).append(work)
    return max((slow * sum(w.forward_s + w.backward_s for w in works), works[0].name) for works in members.values())


def note_on_gradients(schedule: Schedule) -> Iterator[str]:
    """Yield which stages of a training step have no backward."""
    if count := min(schedule.differentiated, default=0):
        stages = "stage 0 has" if count == 1 else f"stages 0 to {count - 1} have"
        yield f"{stages} no backward: nothing up to there is trained, and no input wants a gradient"


def note_on_training(costs: Profile, schedule: str) -> str | None:
    """Return that nothing trains, and why; None where something does, and under a schedule without a backward."""
    parameters = [state for state in costs.state.values() if state.is_parameter and state.uses]
    if schedule == "forward" or any(state.trainable for state in parameters):
        return None
    why = f"all {len(parameters)} parameters that it uses are frozen" if parameters else "the model uses no parameters"
    backward = any(node.backward_s for node in costs.nodes.values())
    has = "a backward for the gradients of inputs alone" if backward else "no backward"
    return (
        f"nothing trains: {why}, and the plan has {has} and no gradients of parameters; "
        "requires_grad_() on what is to be trained changes that, schedule='forward' plans an evaluation"
    )


def _cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
