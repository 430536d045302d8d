"""What the page of a plan says of moved cuts, in Python: the oracle of its sums, which are done in the browser.

A stage's time changes as the sum of its units' times does, a transfer's as the bytes behind the cut, a device's bytes
by what moves on or off it: state, what each microbatch in flight keeps, the worst transient. So an unmoved cut costs
exactly what the plan says, and a moved one as much as its prediction can tell without the model: a new plan of that
cut counts it from the nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import LaneCurve, StagePlan, Unit
from autosplit.schedule.action import Schedule
from autosplit.schedule.simulate import Timeline, TransferTime, simulate


@dataclass(frozen=True)
class Recost:
    """A plan's prediction for other cuts: seconds per microbatch and stage, peak bytes per device.

    ``step_s`` counts what the plan's own step has beside its timeline.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfers: tuple[TransferTime, ...]
    step_s: float
    bubble: float
    bottleneck_s: float
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True)
class _Sums:
    """What the units of one stage add up to, per microbatch; ``backward_s`` counts what is done again."""

    forward_s: float
    backward_s: float
    weight_s: float
    static_bytes: int
    kept_bytes: float
    transient_bytes: float
    sent_bytes: int


def recost(plan: Plan, stages: Sequence[int]) -> Recost:
    """Return what ``plan`` costs when its unit ``i`` is in stage ``stages[i]``."""
    own = [unit.stage for unit in plan.units]
    schedule = plan.schedule_for(len(plan.microbatch_rows))
    held = [list(_in_flight(schedule, lane)) for lane in range(len(schedule.lanes))]
    ratios = _kept_ratios(plan, held)
    old, new = _sums(plan, own, ratios), _sums(plan, stages, ratios)
    pairs = list(zip(plan.stages, old, new, strict=True))
    forward = tuple(_scaled(stage.forward_s, was.forward_s, now.forward_s) for stage, was, now in pairs)
    backward = tuple(_scaled(stage.backward_s, was.backward_s, now.backward_s) for stage, was, now in pairs)
    weight = tuple(_scaled(stage.weight_s, was.weight_s, now.weight_s) for stage, was, now in pairs)
    transfers = _transfers(plan, old, new)
    moved = _simulated(schedule, forward, backward, weight, transfers)
    before = _simulated(
        schedule,
        [stage.forward_s for stage in plan.stages],
        [stage.backward_s for stage in plan.stages],
        [stage.weight_s for stage in plan.stages],
        _transfers(plan, old, old),
    )
    was_s = _bottleneck_s(schedule, [stage.forward_s + stage.backward_s for stage in plan.stages])
    now_s = _bottleneck_s(schedule, [there + back for there, back in zip(forward, backward, strict=True)])
    return Recost(
        forward_s=forward,
        backward_s=backward,
        weight_s=weight,
        transfers=transfers,
        step_s=plan.step_s + (moved.step_s - before.step_s),
        bubble=moved.bubble,
        bottleneck_s=plan.bottleneck_s + (now_s - was_s),
        peak_bytes=tuple(_peaks(plan, schedule, held, old, new)),
    )


def _in_flight(schedule: Schedule, lane: int) -> Iterator[dict[int, int]]:
    """Yield how many microbatches each stage of a lane holds while each of its actions runs: from F to B, or to W."""
    now: Counter[int] = Counter()
    for action in schedule.lanes[lane]:
        now[action.stage] += action.kind == "F"
        yield dict(now)
        now[action.stage] -= action.kind in "BW" or not schedule.has_backward


def _kept_ratios(plan: Plan, held: Sequence[Sequence[dict[int, int]]]) -> list[float]:
    """Return which part of what its units keep without recompute a stage keeps under "block", by the plan's peak."""
    ratios = []
    for stage in plan.stages:
        most = max((counts.get(stage.index, 0) for counts in held[stage.lane]), default=0)
        kept = most * sum(unit.kept_bytes for unit in plan.units if unit.stage == stage.index)
        known = stage.recompute == "block" and kept > 0
        ratios.append(min(1.0, stage.memory.activation_bytes / kept) if known else 1.0)
    return ratios


def _sums(plan: Plan, stages: Sequence[int], ratios: Sequence[float]) -> list[_Sums]:
    members: list[list[Unit]] = [[] for _ in plan.stages]
    for unit, stage in zip(plan.units, stages, strict=True):
        members[stage].append(unit)
    entering = [0, *(own[-1].sent_bytes for own in members)]
    microbatches = len(plan.microbatch_rows)
    return [
        _sum(stage, own, ratio, entering=sent, microbatches=microbatches)
        for stage, own, ratio, sent in zip(plan.stages, members, ratios, entering, strict=False)
    ]


def _sum(stage: StagePlan, own: Sequence[Unit], ratio: float, *, entering: int, microbatches: int) -> _Sums:
    """Return what a stage's units add up to; ``entering`` bytes are all that a stage keeps which is done again whole.

    Of the first stage's inputs nothing changes, so they count as none.
    """
    again = {"never": 0.0, "except_last": (microbatches - 1) / microbatches}.get(stage.recompute, 1.0)
    forward_s = sum(unit.forward_s for unit in own)
    kept: float = sum(unit.kept_bytes for unit in own)
    transient: float = max(unit.transient_bytes for unit in own)
    if stage.recompute == "block":
        transient = max(unit.transient_bytes + (1 - ratio) * unit.kept_bytes for unit in own)
        kept *= ratio
    elif stage.recompute != "never":
        transient += max(0.0, kept - entering)
        kept = entering
    return _Sums(
        forward_s=forward_s,
        backward_s=sum(unit.backward_s for unit in own) + again * forward_s,
        weight_s=sum(unit.weight_s for unit in own),
        static_bytes=sum(unit.static_bytes for unit in own),
        kept_bytes=kept,
        transient_bytes=transient,
        sent_bytes=own[-1].sent_bytes,
    )


def _scaled(own_s: float, was_s: float, now_s: float) -> float:
    """Return a stage's time when the sum of its units' was one and is another."""
    if now_s == was_s:
        return own_s
    return own_s * (now_s / was_s) if was_s > 0 else own_s + now_s


def _transfers(plan: Plan, old: Sequence[_Sums], new: Sequence[_Sums]) -> tuple[TransferTime, ...]:
    """Return the plan's transfers; those to the next stage last as long as the bytes behind their cut say."""
    found = []
    for own in plan.transfers:
        was, now = old[own.producer].sent_bytes, new[own.producer].sent_bytes
        share = now / was if own.consumer == own.producer + 1 and was > 0 else 1.0
        found.append(TransferTime(own.producer, own.consumer, share * own.forward_s, share * own.backward_s))
    return tuple(found)


def _simulated(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float],
    transfers: tuple[TransferTime, ...],
) -> Timeline:
    return simulate(
        schedule,
        forward_s=forward_s,
        backward_s=backward_s,
        input_gradient_s=[whole - own for whole, own in zip(backward_s, weight_s, strict=True)],
        weight_gradient_s=weight_s,
        transfers=transfers,
    )


def _bottleneck_s(schedule: Schedule, loads_s: Sequence[float]) -> float:
    totals = [0.0] * len(schedule.lanes)
    for lane, load_s in zip(schedule.stage_lane, loads_s, strict=True):
        totals[lane] += load_s
    return max(totals)


def _peaks(
    plan: Plan,
    schedule: Schedule,
    held: Sequence[Sequence[dict[int, int]]],
    old: Sequence[_Sums],
    new: Sequence[_Sums],
) -> Iterator[int]:
    """Yield each device's peak: the plan's, and by how much the greatest moment grows."""
    known = plan.curves_match(schedule)
    for lane in range(len(plan.devices)):
        was = list(_held_bytes(schedule, lane, held[lane], old))
        now = list(_held_bytes(schedule, lane, held[lane], new))
        if known:
            base = _totals(plan.curves[lane])
            now = [total + after - before for total, before, after in zip(base, was, now, strict=True)]
            was = [float(total) for total in base]
        peak = next(stage.memory.peak_bytes for stage in plan.stages if stage.lane == lane)
        yield peak + math.floor(max(now) - max(was) + 0.5)


def _held_bytes(
    schedule: Schedule, lane: int, held: Sequence[dict[int, int]], sums: Sequence[_Sums]
) -> Iterator[float]:
    """Yield what the additive formula says of a device: while each of its actions runs, and in the optimizer's step."""
    static = sum(own.static_bytes for own, place in zip(sums, schedule.stage_lane, strict=True) if place == lane)
    for action, counts in zip(schedule.lanes[lane], held, strict=True):
        kept = sum(count * sums[stage].kept_bytes for stage, count in counts.items())
        yield static + kept + sums[action.stage].transient_bytes
    yield static


def _totals(curve: LaneCurve) -> list[int]:
    return [sum(moment) for moment in zip(*curve.kinds, strict=True)]
