"""Why a plan is as it is, in words, and what a step that ran out of memory is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from autosplit.planning.explain.verdicts import DeviceVerdict, binding, device_verdicts
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative, StagePlan, Unit, recompute_of
from autosplit.planning.timeline import host_step, simulated
from autosplit.schedule.action import Action
from autosplit.units import format_bytes, format_seconds, plural

_FULL = 0.9
"""A device is full that holds this share of its capacity."""
_LONG_LINK = 0.5
"""A transfer is long that takes this share of the forward that waits for it."""
_NOTABLE = 0.01
_SKEWED = 0.05
"""An even cut is worth a word that would shorten the step by so much."""
_WORTH = 1.05
"""The host binds where waiting for it makes a step so many times as long."""


def reasons(plan: Plan) -> tuple[str, ...]:
    """Return what is to be said about a plan, from what it holds; nothing about what it does not hold."""
    return (*_recompute(plan), *_skewed(plan), *_links(plan), *_host(plan), *_tradeoffs(plan))


def _recompute(plan: Plan) -> Iterator[str]:
    """Yield what recompute costs in time and saves in memory."""
    again = [stage for stage in plan.stages if stage.recompute != "never"]
    if not again:
        return
    cost = simulated(plan).step_s / simulated(without_recompute(plan)).step_s - 1
    where = "every stage" if len(again) == len(plan.stages) else _named("stage", [stage.index for stage in again])
    kinds = sorted({stage.recompute for stage in again})
    saved = max(saved_bytes(plan), default=0)
    saves = f" and saves {format_bytes(saved)} on the fullest device" if saved > 0 else ""
    does = "recomputes" if len(again) == 1 or where == "every stage" else "recompute"
    yield f"{where} {does} ({', '.join(kinds)}), which costs {cost:.0%} of the step{saves}"


def without_recompute(plan: Plan) -> Plan:
    """Return the plan with the times of stages that do nothing again."""
    stages = []
    for stage in plan.stages:
        older_s = stage.forward_s if stage.recompute != "never" else 0.0
        again_s = older_s if stage.again_s is None else stage.again_s
        backward_s = max(stage.weight_s, stage.backward_s - again_s)
        stages.append(stage.model_copy(update={"recompute": "never", "backward_s": backward_s}))
    return plan.model_copy(update={"stages": tuple(stages)})


def saved_bytes(plan: Plan) -> list[int]:
    """Return, per device that recomputes, what it would hold more without; empty where the plan has no units.

    That is by the formula: what its units keep of each microbatch in flight, against its peak.
    """
    if not plan.units:
        return []
    held = plan.schedule_for(len(plan.microbatch_rows)).in_flight
    saved = []
    for device in device_verdicts(plan):
        stages = [plan.stages[index] for index in device.stages]
        if all(stage.recompute == "never" for stage in stages):
            continue
        units = [unit for unit in plan.units if unit.stage in device.stages]
        kept = sum(held[unit.stage] * unit.kept_bytes for unit in units)
        transient = max((unit.transient_bytes for unit in units), default=0)
        saved.append(device.states_bytes + kept + transient - device.peak_bytes)
    return saved


def _skewed(plan: Plan) -> Iterator[str]:
    """Yield what an even cut would take, where the plan's fits by stages of uneven work."""
    full = max(device.share for device in device_verdicts(plan))
    frozen = plan.stages[0].gradients == "none"  # of even stages it would have a backward
    if plan.replicas or full < _FULL or plan.verdict == "no" or len(plan.stages) < 2 or frozen:
        return
    count, even = len(plan.stages), plan.model_copy(update={"stages": _even(plan)})
    even_s = plan.step_s - simulated(plan).step_s + simulated(even).step_s
    if even_s < plan.step_s * (1 - _SKEWED):
        needs = _even_bytes(plan)
        room = "" if needs is None else f", and need about {format_bytes(needs)} on the fullest device"
        yield (
            f"{count} stages of uneven work are what makes it fit: evenly cut the step would take about "
            f"{format_seconds(even_s)}, {1 - even_s / plan.step_s:.0%} less{room}"
        )


def _even(plan: Plan) -> tuple[StagePlan, ...]:
    """Return the stages with the mean of their times."""
    times = ("forward_s", "backward_s", "weight_s")
    means = {name: sum(getattr(stage, name) for stage in plan.stages) / len(plan.stages) for name in times}
    return tuple(stage.model_copy(update=means) for stage in plan.stages)


def _even_bytes(plan: Plan) -> int | None:
    """Return what the fullest device needs where units go to stages of even work, by the formula of `saved_bytes`.

    None where the plan has no units, and where stages recompute.
    """
    if not plan.units or any(stage.recompute != "never" for stage in plan.stages):
        return None
    held, total_s = plan.schedule_for(len(plan.microbatch_rows)).in_flight, sum(map(_unit_s, plan.units))
    before_s, needs, transient = 0.0, Counter[int](), Counter[int]()
    for unit in plan.units:
        stage = min(int(len(plan.stages) * (before_s + _unit_s(unit) / 2) / total_s), len(plan.stages) - 1)
        lane = plan.stages[stage].lane
        needs[lane] += unit.static_bytes + held[stage] * unit.kept_bytes
        transient[lane] = max(transient[lane], unit.transient_bytes)
        before_s += _unit_s(unit)
    return max(needs[lane] + transient[lane] for lane in needs)


def _unit_s(unit: Unit) -> float:
    return unit.forward_s + unit.backward_s


def _links(plan: Plan) -> Iterator[str]:
    """Yield the longest transfer where it is long beside the work that waits for it."""
    long = [t for t in plan.transfers if t.forward_s > _LONG_LINK * plan.stages[t.consumer].forward_s > 0]
    if long:
        worst = max(long, key=lambda transfer: transfer.forward_s)
        behind = format_seconds(plan.stages[worst.consumer].forward_s)
        yield (
            f"the way from stage {worst.producer} to stage {worst.consumer} takes {format_seconds(worst.forward_s)} "
            f"per microbatch, the forward behind it {behind}: the link binds where the schedule cannot hide it"
        )


def _host(plan: Plan) -> Iterator[str]:
    """Yield a sentence if the host, or each process for its own device, issues kernels slower than devices run them."""
    if (waiting := host_step(plan)) is None:
        return
    step_s = plan.step_s + waiting.step_s - simulated(plan).step_s
    if step_s <= _WORTH * plan.step_s:
        return
    who = "one host thread issues" if plan.issue_threads == 1 else f"{plan.issue_threads} host threads each issue"
    binds = f"host-bound: {who}"
    if plan.processes:
        binds = "launch-bound: each process issues its device's own"
    yield (
        f"{binds} kernels for {format_seconds(waiting.host_s)} per step, the devices need "
        f"{format_seconds(plan.step_s)}: expect {format_seconds(step_s)}; fewer chunks mean fewer kernels, and "
        "compile=True fuses them"
    )


def _tradeoffs(plan: Plan) -> Iterator[str]:
    """Yield the best of the other plans: what is faster and needs more, what needs less and is slower."""
    peak = max(stage.memory.peak_bytes for stage in plan.stages)
    others = [other for other in plan.frontier if not _same(plan, other)]
    smaller = [other for other in others if other.peak_bytes < peak and other.step_s > plan.step_s * (1 + _NOTABLE)]
    faster = [other for other in others if other.step_s < plan.step_s * (1 - _NOTABLE)]
    if faster and plan.verdict != "no":
        best = max(faster, key=lambda other: other.step_s)
        but = {"no": " and does not fit", "borderline": " and may not fit", "fits": ", which fits by formula alone"}
        needs = f"needs {format_bytes(best.peak_bytes)} on the fullest device{but[best.verdict]}"
        yield f"{differs(plan, best)}: {1 - best.step_s / plan.step_s:.0%} faster, {needs}"
    if smaller:
        best = min(smaller, key=lambda other: other.step_s)
        needs = f"{format_bytes(best.peak_bytes)} on the fullest device, {format_bytes(peak - best.peak_bytes)} less"
        yield f"{differs(plan, best)}: {best.step_s / plan.step_s - 1:.0%} slower, needs {needs}"


def _same(plan: Plan, other: Alternative) -> bool:
    this = (plan.chunks, plan.schedule, plan.virtual_stages, plan.replicas, {stage.recompute for stage in plan.stages})
    return this == (other.chunks, other.schedule, other.virtual_stages, other.replicas, set(other.recompute))


def differs(plan: Plan, other: Alternative) -> str:
    """Return what another plan chose otherwise: ``with 8 microbatches and recompute block``, ``without recompute``."""
    ways = []
    if other.chunks != plan.chunks:
        ways.append(f"{other.chunks} microbatches")
    if (other.schedule, other.virtual_stages) != (plan.schedule, plan.virtual_stages):
        each = f" x {other.virtual_stages} stages per device" if other.virtual_stages > 1 else ""
        ways.append(f"schedule {other.schedule}{each}")
    if other.replicas != plan.replicas:
        ways.append(f"replicas {list(other.replicas)}" if other.replicas else "a device for each stage")
    counts, without = Counter(other.recompute), ""
    if recompute_of(other.recompute) != recompute_of([stage.recompute for stage in plan.stages]):
        if set(counts) == {"never"}:
            without = "without recompute"
        elif len(counts) == 1:
            ways.append(f"recompute {other.recompute[0]} on every stage")
        else:
            parts = [f"{kind} on {plural(count, 'stage')}" for kind, count in counts.most_common() if kind != "never"]
            ways.append(f"recompute {_and(parts)}")
    return " and ".join(filter(None, (without, f"with {_and(ways)}" if ways else ""))) or "with another cut"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _named(noun: str, indices: Sequence[int]) -> str:
    """Return numbers as ranges behind their noun: ``stages 0-2, 5``."""
    runs = []
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [index for _, index in run]
        runs.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}")
    return f"{noun}{'s' * (len(indices) > 1)} {', '.join(runs)}"


_MOST = 3
"""So many ways out are named at most."""
_OTHERS = 1.02
"""Tensors that have so many times the predicted peak are more than the step's own."""


def short_of_memory(plan: Plan, *, action: Action | None, sizes: Sequence[int], held_bytes: int | None = None) -> str:
    """Return what the plan knows of a step in which memory ran out, in one paragraph.

    ``action`` is where; None: between the cells. ``sizes`` are the rows of the batch's microbatches, ``held_bytes``
    what all tensors had on the action's device then; None where nobody counts them.
    """
    devices = device_verdicts(plan)
    if action is None:
        where = "out of memory between the cells of a step"
        devices = (binding(plan) or max(devices, key=lambda verdict: verdict.peak_bytes),)
    else:
        lane = plan.stages[action.stage].lane
        devices = tuple(verdict for verdict in devices if verdict.lane == lane)
        where = f"out of memory in {action}"
    full = devices[0]
    room = "no limit is known" if full.capacity_bytes is None else f"{format_bytes(full.capacity_bytes)} are available"
    held = "" if held_bytes is None else f", and tensors had {format_bytes(held_bytes)} when it ran out"
    planned = f"{'' if action is None else 'stage ' + str(action.stage) + ' is '}on {full.device}"
    facts = f"{where}: {planned}, where {format_bytes(full.peak_bytes)} were predicted and {room}{held}"
    helps = [*_helps(plan, full, sizes, held_bytes)][:_MOST]
    return f"{facts}. What would help: {'; '.join(helps)}. The pipe can be called again once there is room"


def _helps(plan: Plan, full: DeviceVerdict, sizes: Sequence[int], held_bytes: int | None) -> Iterator[str]:
    """Yield ways out, those that the numbers speak for first."""
    planned = plan.microbatch_rows
    if max(sizes) > max(planned) or (len(sizes), sum(sizes)) > (len(planned), sum(planned)):
        yield (
            f"a plan for this batch, with sample= of its size: it has {sum(sizes)} rows in {len(sizes)} microbatches, "
            f"planned were {sum(planned)} in {len(planned)}"
        )
    if held_bytes is not None and held_bytes > _OTHERS * full.peak_bytes:
        gap = format_bytes(held_bytes - full.peak_bytes)
        yield f"to free what else lies on {full.device}: tensors had {gap} more than all that was predicted of the step"
    yield from (change.text for change in plan.changes[:1])
    peak = max(stage.memory.peak_bytes for stage in plan.stages)
    smaller = [other for other in plan.frontier if other.peak_bytes < peak]
    if smaller:
        best = min(smaller, key=lambda other: (other.verdict == "no", other.step_s))
        less = format_bytes(peak - best.peak_bytes)
        yield f"the same model {differs(plan, best)}: {less} less on the fullest device by the plan"
    if any(plan.stages[stage].recompute != "always" for stage in full.stages):
        yield "recompute='always' or 'block', which keeps less from forward to backward"
    if max(planned) > 1:
        yield f"more than {plan.chunks} chunks, or fewer rows in the batch"
    yield "more devices, or a lower memory_limit= to plan for"
