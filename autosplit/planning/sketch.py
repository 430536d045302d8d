"""What a plan's model would come to in another setting, from its units alone: quick, and near enough to rank changes.

Units in model order, in pieces of a few, are cut into one run per device: the fastest such cut that fits. A device
holds its units' state, what every microbatch in flight keeps, and the worst of what lives inside one unit. Both figures
are scaled by how the plan's own came out beside the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autosplit.partition.problem import again_share
from autosplit.planning.plan import Plan
from autosplit.planning.records import Unit
from autosplit.planning.sketch_held import Held, held_by
from autosplit.planning.timeline import predicted_step_s
from autosplit.planning.verdicts import Verdict, device_verdicts, judged
from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import TransferTime, simulate_step_s

_HALVINGS = 24
_PIECES = 256
"""Units of one block are taken together until there are so many."""
_RATIOS = (0.5, 2.0)
"""How far a plan's own figures may scale an estimate."""
_RANGE = (0.97, 1.03)
"""The range of an estimated peak where the plan's own peaks have none."""
_START = 0.6
"""What starting a kernel costs on a device beside what issuing it costs the host: 4.5 of 7.5 µs on recent ones."""
_ROOTS = ("adam", "adamw")
"""Optimizers whose step makes a list as large as what they update, where they update many parameters at once."""


@dataclass(frozen=True)
class Setting:
    """What an estimate is of.

    Attributes:
        rows: of one microbatch.
        capacity_bytes: of every device, less its reserve; None where it is not known.
        recompute: of every stage.
        static, kept, seconds: shares of the plan's own bytes of state, of activations, and of its times.
    """

    devices: int
    microbatches: int
    rows: int
    schedule: str
    virtual_stages: int
    recompute: Literal["never", "always", "except_last", "block"]
    capacity_bytes: int | None
    static: float = 1.0
    kept: float = 1.0
    seconds: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """What a setting would come to: its step, its largest peak, and whether that surely fits."""

    setting: Setting
    step_s: float
    peak_bytes: int
    verdict: Verdict | None


class Sketch:
    """A plan's model in units, and how the plan's own figures came out beside their sums."""

    def __init__(self, plan: Plan) -> None:
        """Raise ValueError where the plan does not hold its model in units."""
        if not plan.units:
            raise ValueError("the plan does not hold its model in units; plan again")
        self.plan, self.units = plan, _pieces(plan.units)
        self.rows = max(plan.microbatch_rows)
        self.update = _update_share(plan)
        self.gradient = sum(m.parameter_bytes for m in (stage.memory for stage in plan.stages)) / max(
            sum(unit.static_bytes for unit in plan.units), 1
        )
        self.fixed = _fixed_share(plan)
        verdicts = device_verdicts(plan)
        fullest = max(verdicts, key=lambda device: device.peak_bytes)
        ranged = fullest.low_bytes != fullest.high_bytes and fullest.peak_bytes
        self.low = fullest.low_bytes / fullest.peak_bytes if ranged else _RANGE[0]
        self.high = fullest.high_bytes / fullest.peak_bytes if ranged else _RANGE[1]
        self.peak_ratio = self._own_peak_ratio(fullest.stages, fullest.peak_bytes)
        timeline_s = predicted_step_s(plan)
        self.beside_s = max(0.0, plan.step_s - timeline_s)
        hops = [t for t in plan.transfers if t.consumer == t.producer + 1]
        self.hop_s = max((t.forward_s for t in hops), default=0.0), max((t.backward_s for t in hops), default=0.0)

    def setting(self) -> Setting:
        """Return the plan's own setting, with the recompute of most of its stages and its least capacity."""
        plan = self.plan
        kinds = [stage.recompute for stage in plan.stages]
        known = [one.room_bytes for one in device_verdicts(plan) if one.room_bytes is not None]
        return Setting(
            devices=len(plan.devices),
            microbatches=len(plan.microbatch_rows),
            rows=self.rows,
            schedule="1f1b" if plan.actions else plan.schedule,
            virtual_stages=1 if plan.actions else plan.virtual_stages,
            recompute=max(kinds, key=kinds.count),
            capacity_bytes=min(known, default=None),
        )

    def estimate(self, setting: Setting) -> Estimate | None:
        """Return what a setting would come to; None where it cannot fit, or there are too few units for the devices."""
        if setting.devices * setting.virtual_stages > len(self.units):
            return None
        weights, capacity = _Weights(self, setting), setting.capacity_bytes
        limits = (math.inf,) if capacity is None else (capacity / self.high, capacity / self.low)
        cut = next((found for found in map(weights.fastest, limits) if found is not None), None)
        if cut is None:
            return None
        peak = max(map(weights.peak, range(setting.devices), cut))
        verdict = judged(peak, capacity, low=math.floor(self.low * peak), high=math.floor(self.high * peak))
        return Estimate(setting, self._step_s(setting, cut), peak, verdict)

    def holds(self, setting: Setting, *, surely: bool) -> bool:
        """Tell whether a setting surely fits, or whether it may: without how fast it is, quicker than an estimate."""
        if setting.devices * setting.virtual_stages > len(self.units):
            return False
        if setting.capacity_bytes is None:
            return True
        weights = _Weights(self, setting)
        return weights.fills(setting.capacity_bytes / (self.high if surely else self.low))

    def best(self, settings: Sequence[Setting]) -> Estimate | None:
        """Return the best of several: one that fits before one that may, of those the fastest."""
        found = [own for own in map(self.estimate, settings) if own is not None]
        return min(found, key=_rank, default=None)

    def _step_s(self, setting: Setting, cut: Sequence[Run]) -> float:
        each, grown = setting.virtual_stages, setting.rows / self.rows
        share = setting.seconds * (self.fixed + (1 - self.fixed) * grown)
        schedule = build(
            setting.schedule,
            stages=setting.devices * each,
            microbatches=setting.microbatches,
            virtual_stages=each,
        )
        again = again_share(setting.recompute, microbatches=setting.microbatches)
        sums = [_times(self.units[run.start : run.stop]) for run in cut]
        per_stage = [sums[lane] for lane in schedule.stage_lane]
        forward = [share * own.forward_s / each for own in per_stage]
        weight = [share * own.weight_s / each for own in per_stage]
        backward = [share * (own.backward_s + again * own.forward_s) / each for own in per_stage]
        hop = [grown * setting.kept * own_s for own_s in self.hop_s]
        step_s = simulate_step_s(
            schedule,
            forward_s=forward,
            backward_s=backward,
            input_gradient_s=[whole - own for whole, own in zip(backward, weight, strict=True)],
            weight_gradient_s=weight,
            transfers=tuple(TransferTime(stage, stage + 1, *hop) for stage in range(schedule.stages - 1)),
        )
        return step_s + self.beside_s

    def _own_peak_ratio(self, stages: Sequence[int], peak: int) -> float:
        """Return the plan's fullest peak beside the sums over its own units, without their state."""
        plan = self.plan
        if plan.actions:
            return 1.0
        size = {"stages": len(plan.stages), "microbatches": len(plan.microbatch_rows)}
        static = kept = inside = 0.0
        for stage in stages:
            units = [unit for unit in self.units if unit.stage == stage]
            held = build(plan.schedule, virtual_stages=plan.virtual_stages, **size).in_flight[stage]
            own = held_by(units, plan.stages[stage].recompute, before=_sent_before(self.units, stage))
            static += own.static
            kept += held * own.kept
            inside = max(inside, own.inside)
        if kept + inside <= 0 or peak <= (1 + self.update) * static * 1.001:
            return 1.0
        return min(max((peak - static) / (kept + inside), _RATIOS[0]), _RATIOS[1])


@dataclass(frozen=True)
class Run:
    """The units of one device, from ``start`` to before ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Times:
    forward_s: float
    backward_s: float
    weight_s: float


def _times(units: Sequence[Unit]) -> _Times:
    return _Times(
        sum(unit.forward_s for unit in units),
        sum(unit.backward_s for unit in units),
        sum(unit.weight_s for unit in units),
    )


def _sent_before(units: Sequence[Unit], stage: int) -> float:
    first = next((place for place, unit in enumerate(units) if unit.stage == stage), 0)
    return units[first - 1].sent_bytes if first else 0


class _Filling(NamedTuple):
    """What a device has of some units: the seconds, and the bytes that it needs."""

    load_s: float
    needed: float


class _Weights:
    """The bytes and seconds of runs of units in one setting."""

    def __init__(self, sketch: Sketch, setting: Setting) -> None:
        self.sketch, self.setting, self.units = sketch, setting, sketch.units
        again = again_share(setting.recompute, microbatches=setting.microbatches)
        self.loads = [(1 + again) * unit.forward_s + unit.backward_s for unit in self.units]
        self.scale = setting.kept * setting.rows / sketch.rows * sketch.peak_ratio
        self.held = _held_by_device(setting)
        self._known: dict[tuple[int, int], tuple[Held, list[_Filling]]] = {}

    def peak(self, device: int, run: Run) -> int:
        """Return what a device needs for a run."""
        own = self._empty(run.start)
        for unit in self.units[run.start : run.stop]:
            own.add(unit)
        return round(self._needed(device, own))

    def _empty(self, start: int) -> Held:
        before = self.units[start - 1].sent_bytes if start else 0.0
        grown = self.setting.rows / self.sketch.rows
        return Held(self.setting.recompute, before=before, grown=grown, gradient=self.sketch.gradient)

    def _needed(self, device: int, own: Held) -> float:
        """Return the bytes while a device works, or in the optimizer's step where those are more."""
        static = self.setting.static * own.static
        working = static + self.scale * (self.held[device] * own.kept + own.inside)
        return max(working, (1 + self.sketch.update) * static)

    def fastest(self, limit: float) -> list[Run] | None:
        """Return the cut with the least load of any device among those that need at most so much; None: none does."""
        low, high = max(self.loads), sum(self.loads)
        best = self._filled(high, limit)
        for _ in range(_HALVINGS if best is not None else 0):
            middle = (low + high) / 2
            found = self._filled(middle, limit)
            low, high, best = (low, middle, found) if found is not None else (middle, high, best)
        return best

    def fills(self, limit: float) -> bool:
        """Tell whether there is a cut whose devices need at most so much."""
        return self._filled(sum(self.loads), limit) is not None

    def _filled(self, load_s: float, limit: float) -> list[Run] | None:
        """Give each device in turn as many units as it may have, but leave every other one at least one."""
        runs, start, count = [], 0, len(self.units)
        for device in range(self.setting.devices):
            last = count - (self.setting.devices - device - 1)
            stop, fillings = start, self._fillings(device, start)
            while stop < last:
                own = next(fillings)
                if own.load_s > load_s * (1 + 1e-9) or own.needed > limit:
                    break
                stop += 1
            if stop == start:
                return None
            runs.append(Run(start, stop))
            start = stop
        return runs if start == count else None

    def _fillings(self, device: int, start: int) -> Iterator[_Filling]:
        """Yield what a device has of one unit from a place on, of two, ...; each is added up once."""
        if (device, start) not in self._known:
            self._known[device, start] = self._empty(start), []
        own, found = self._known[device, start]
        yield from found
        for unit, load_s in zip(self.units[start + len(found) :], self.loads[start + len(found) :], strict=True):
            own.add(unit)
            found.append(_Filling((found[-1].load_s if found else 0.0) + load_s, self._needed(device, own)))
            yield found[-1]


def _held_by_device(setting: Setting) -> list[float]:
    """Return how many microbatches' worth of all its units each device holds at most."""
    stages = setting.devices * setting.virtual_stages
    size = {"stages": stages, "microbatches": setting.microbatches, "virtual_stages": setting.virtual_stages}
    schedule = build(setting.schedule, **size)
    held = [0.0] * setting.devices
    for lane, count in zip(schedule.stage_lane, schedule.in_flight, strict=True):
        held[lane] += count / setting.virtual_stages
    return held


def _update_share(plan: Plan) -> float:
    """Return what the optimizer's step makes, beside the state that it updates."""
    parameters = sum(stage.memory.parameter_bytes for stage in plan.stages)
    static = sum(unit.static_bytes for unit in plan.units)
    if plan.optimizer not in _ROOTS or not static or all(stage.device.startswith("cpu") for stage in plan.stages):
        return 0.0
    return parameters * (2 if plan.precision == "bf16_fp32_master" else 1) / static


def _fixed_share(plan: Plan) -> float:
    """Return the part of the plan's times that is the start of kernels, whatever their work."""
    works_s = sum(stage.forward_s + stage.backward_s for stage in plan.stages)
    issue_s = sum(stage.forward_issue_s + stage.backward_issue_s for stage in plan.stages)
    return min(1.0, _START * issue_s / works_s) if works_s else 0.0


def _rank(found: Estimate) -> tuple[bool, float]:
    return found.verdict == "borderline", found.step_s


def _pieces(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return the units, neighbours of one block and stage taken together where there are very many."""
    together = -(-len(units) // _PIECES)
    found: list[Unit] = []
    joined = 1
    for unit in units:
        last = found[-1] if found else None
        alike = last is not None and unit.block is not None and (unit.block, unit.stage) == (last.block, last.stage)
        if last is None or not alike or joined >= together:
            found.append(unit)
            joined = 1
        else:
            found[-1] = _joined(last, unit)
            joined += 1
    return tuple(found)


def _joined(first: Unit, second: Unit) -> Unit:
    return second.model_copy(
        update={
            "forward_s": first.forward_s + second.forward_s,
            "backward_s": first.backward_s + second.backward_s,
            "weight_s": first.weight_s + second.weight_s,
            "static_bytes": first.static_bytes + second.static_bytes,
            "kept_bytes": first.kept_bytes + second.kept_bytes,
            "transient_bytes": max(first.transient_bytes, second.transient_bytes),
        }
    )
