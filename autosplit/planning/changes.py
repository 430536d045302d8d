"""What would make a plan fit that does not: the cheapest change of every kind, with its price.

Each kind is estimated on the plan's units, the least change that fits is kept, and where there is a way to plan anew
it is planned, so that what is listed holds. Kinds come in the order of what they ask of the caller: the same numbers
in more time, another batch, other hardware, other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from autosplit.options import Options
from autosplit.planning.choose import Space
from autosplit.planning.plan import Plan
from autosplit.planning.records import Change
from autosplit.planning.sketch import Estimate, Setting, Sketch
from autosplit.planning.verdicts import Verdict
from autosplit.units import format_bytes, format_seconds
from cost_models import registry
from cost_models.specs import DeviceSpec

Kind = Literal["recompute", "chunks", "schedule", "devices", "batch", "optimizer", "precision", "device"]
Arguments = Mapping[str, str | int]
Replan = Callable[[Arguments], Plan | None]

_ORDER: tuple[tuple[Kind, ...], ...] = (
    ("recompute", "chunks", "schedule"),
    ("batch",),
    ("devices", "device"),
    ("optimizer", "precision"),
)
_RECOMPUTE = ("block", "always")
_MOST_DEVICES = 4096
_PER_HOST = 8
_PLANNED = 3
"""So many of the estimates are planned anew."""


@dataclass(frozen=True)
class _Candidate:
    """One change: what it is called, the arguments that say it, and the settings that it leaves to choose among."""

    kind: Kind
    words: str
    arguments: dict[str, str | int]
    settings: tuple[Setting, ...]
    note: str = ""


@dataclass(frozen=True)
class _Found:
    """A change that is estimated to fit, or planned."""

    candidate: _Candidate
    step_s: float
    peak_bytes: int
    verdict: Verdict
    rows: int
    planned: bool = False


def changes(plan: Plan, options: Options, space: Space, *, replan: Replan | None = None) -> tuple[Change, ...]:
    """Return the changes, one of a kind at most, that would make a plan fit, those that ask the least first.

    ``options`` and ``space`` are what the plan was chosen under. ``replan`` plans anew with other arguments of `plan`
    (``batch`` stands for the rows of the sample), None where it cannot; without it all figures are estimates. Empty
    for a plan that fits, and for one without units.
    """
    if plan.verdict == "fits" or not plan.units:
        return ()
    sketch = Sketch(plan)
    listed = _Kinds(plan, options, space, sketch)
    found = [own for own in (_first(sketch, of_kind) for of_kind in listed.all()) if own is not None]
    found.sort(key=_price)
    if replan is not None:
        found = [*filter(None, (_planned(own, replan) for own in found[:_PLANNED])), *found[_PLANNED:]]
        found.sort(key=_price)
    return tuple(_change(plan, own) for own in found)


def _first(sketch: Sketch, candidates: Iterator[_Candidate]) -> _Found | None:
    """Return the first candidate that fits; else the first that may."""
    borderline = None
    for candidate in candidates:
        best = sketch.best(candidate.settings)
        if best is None:
            continue
        if best.verdict != "borderline":
            return _estimated(candidate, best)
        if borderline is None:
            borderline = _estimated(candidate, best)
    return borderline


def _estimated(candidate: _Candidate, best: Estimate) -> _Found:
    setting = best.setting
    rows = setting.rows * setting.microbatches
    return _Found(candidate, best.step_s, best.peak_bytes, best.verdict or "fits", rows)


def _planned(own: _Found, replan: Replan) -> _Found | None:
    """Return a change as it was planned; None where it does not fit after all."""
    plan = replan(own.candidate.arguments)
    if plan is None:
        return own
    if plan.verdict == "no":
        return None
    peak = max(stage.memory.peak_bytes for stage in plan.stages)
    return replace(
        own,
        step_s=plan.step_s,
        peak_bytes=peak,
        verdict=plan.verdict,
        rows=sum(plan.microbatch_rows),
        planned=True,
    )


def _price(own: _Found) -> tuple[int, int, float]:
    group = next(place for place, kinds in enumerate(_ORDER) if own.candidate.kind in kinds)
    return group, own.verdict != "fits", own.step_s / max(own.rows, 1)


def _change(plan: Plan, own: _Found) -> Change:
    about = "" if own.planned else "about "
    fits = "" if own.verdict == "fits" else ", borderline"
    text = (
        f"{own.candidate.words}: {about}{format_bytes(own.peak_bytes)} on the fullest device{fits}, "
        f"{_longer(plan, own)}{own.candidate.note}"
    )
    return Change(
        kind=own.candidate.kind,
        text=text,
        arguments=own.candidate.arguments,
        step_s=own.step_s,
        peak_bytes=own.peak_bytes,
        verdict=own.verdict,
        planned=own.planned,
    )


def _longer(plan: Plan, own: _Found) -> str:
    """Return the price in time; of a batch of another size, per row."""
    rows = sum(plan.microbatch_rows)
    ratio = (own.step_s / max(own.rows, 1)) / (plan.step_s / rows) if plan.step_s else 1.0
    about = "" if own.planned else "about "
    of = f"the step {about}{format_seconds(own.step_s)}," + (" per row" if own.candidate.kind == "batch" else "")
    if abs(ratio - 1) < 0.005:
        return f"{of} as long"
    if ratio >= 2:
        return f"{of} {ratio:.1f} times as long"
    return f"{of} {abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'}"


class _Kinds:
    """The candidates of each kind, those that change the least first."""

    def __init__(self, plan: Plan, options: Options, space: Space, sketch: Sketch) -> None:
        self.plan, self.options, self.space, self.sketch = plan, options, space, sketch
        self.own = sketch.setting()
        self.rows = sum(plan.microbatch_rows)
        self.free_recompute = space.recompute is None
        self.again = _RECOMPUTE if self.free_recompute else (self.own.recompute,)

    def all(self) -> Iterator[Iterator[_Candidate]]:
        """Yield the kinds."""
        yield self._recompute()
        yield self._chunks()
        yield self._schedule()
        yield self._batch()
        yield self._devices()
        yield self._device()
        yield self._optimizer()
        yield self._precision()

    def _settings(self, **fields: object) -> tuple[Setting, ...]:
        """Return the plan's own setting with other fields, under each recompute and some chunks that may be chosen."""
        base = replace(self.own, **fields)  # type: ignore[arg-type]
        kinds = dict.fromkeys((base.recompute, *self.again) if "recompute" not in fields else (base.recompute,))
        found = tuple(replace(base, recompute=kind) for kind in kinds)
        if fields.keys() & {"microbatches", "rows"}:
            return found
        counts = dict.fromkeys((base.microbatches, *self._few_chunks(base.devices)))
        return tuple(replace(own, microbatches=count, rows=-(-self.rows // count)) for own in found for count in counts)

    def _few_chunks(self, devices: int) -> Iterator[int]:
        """Yield the counts of microbatches that may be chosen and are about twice and six times the devices."""
        allowed = [count for count in self.space.chunks if count <= self.rows]
        for times in (2, 6):
            yield from [min(allowed, key=lambda count: abs(count - times * devices))] if allowed else []

    def _recompute(self) -> Iterator[_Candidate]:
        if not self.free_recompute:
            for kind in _RECOMPUTE:
                settings = self._settings(recompute=kind)
                yield _Candidate("recompute", f'recompute="{kind}"', {"recompute": kind}, settings)

    def _chunks(self) -> Iterator[_Candidate]:
        chunks = self.own.microbatches * 2
        while len(self.space.chunks) == 1 and chunks <= self.rows:
            settings = self._settings(microbatches=chunks, rows=-(-self.rows // chunks))
            yield _Candidate("chunks", f"chunks={chunks}", {"chunks": chunks}, settings)
            chunks *= 2

    def _schedule(self) -> Iterator[_Candidate]:
        if len(self.space.schedules) == 1 and self.plan.schedule not in ("1f1b", "forward"):
            settings = self._settings(schedule="1f1b", virtual_stages=1)
            yield _Candidate("schedule", 'schedule="1f1b"', {"schedule": "1f1b"}, settings)

    def _batch(self) -> Iterator[_Candidate]:
        """A smaller microbatch, as many of them."""
        for rows in range(self.own.rows - 1, 0, -1):
            total = rows * self.own.microbatches
            yield _Candidate("batch", f"a batch of {total} rows", {"batch": total}, self._settings(rows=rows))

    def _devices(self) -> Iterator[_Candidate]:
        if self.plan.actions or self.options.machine is None:
            return
        names = {spec.name for spec in self.options.machine.devices}
        if len(names) > 1:
            return
        [name] = names
        for count, text in device_counts(name, more_than=self.own.devices):
            note = f", {count / self.own.devices:.3g} times the devices"
            yield _Candidate("devices", text, {"devices": text}, self._settings(devices=count), note)

    def _device(self) -> Iterator[_Candidate]:
        machine = self.options.machine
        if machine is None or self.options.memory_limit is not None or len({s.name for s in machine.devices}) > 1:
            return
        present = machine.devices[0]
        for spec in _larger(present):
            text = f"{self.own.devices}x{spec.name}"
            usable = max(0, (spec.usable_bytes or 0) - self.options.reserve_bytes)
            settings = self._settings(capacity_bytes=usable, seconds=_speed(present, spec))
            yield _Candidate("device", text, {"devices": text}, settings)

    def _optimizer(self) -> Iterator[_Candidate]:
        if self.plan.optimizer not in ("adam", "adamw"):
            return
        elements = sum(stage.parameters for stage in self.plan.stages)
        own = self._state_bytes()
        master = 4 * elements if self.plan.precision == "bf16_fp32_master" else 0
        names: tuple[tuple[str | int, str, int], ...] = (
            (2, "optimizer=2 (bytes per parameter: Adam with 8-bit states)", 2 * elements),
            ("momentum", 'optimizer="momentum"', master or own.parameters),
            ("sgd", 'optimizer="sgd"', 0),
        )
        for value, words, size in names:
            share = (own.parameters + own.gradients + own.buffers + master + size) / max(own.total, 1)
            note = "; it trains otherwise"
            yield _Candidate("optimizer", words, {"optimizer": value}, self._settings(static=share), note)

    def _precision(self) -> Iterator[_Candidate]:
        own = self._state_bytes()
        elements = sum(stage.parameters for stage in self.plan.stages)
        if not elements or self.options.machine is None:
            return
        if self.plan.precision in ("bf16", "bf16_fp32_master") or own.parameters < 4 * elements:
            masters = self.plan.precision == "bf16_fp32_master"
            names: tuple[str, ...] = ("bf16",) if masters else ()
            kept = 1.0
        else:
            names, kept = ("bf16_fp32_master", "bf16"), 0.5
        for name in names:
            yield self._in_precision(name, own, elements, kept if "amp" not in (self.plan.precision or "") else 1.0)

    def _in_precision(self, name: str, own: _StateBytes, elements: int, kept: float) -> _Candidate:
        parameter = gradient = 2 * elements
        moments = {"adam": 2, "adamw": 2, "momentum": 1}.get(self.plan.optimizer, 0)
        master = 4 * elements if name == "bf16_fp32_master" else 0
        state = master + moments * (master or parameter)
        if self.plan.optimizer.isdecimal():
            state = master + int(self.plan.optimizer) * elements
        share = (parameter + gradient + state + own.buffers) / max(own.total, 1)
        settings = self._settings(static=share, kept=kept, seconds=kept)
        note = "; other rounding"
        return _Candidate("precision", f'precision="{name}"', {"precision": name}, settings, note)

    def _state_bytes(self) -> _StateBytes:
        memory = [stage.memory for stage in self.plan.stages]
        total = sum(unit.static_bytes for unit in self.plan.units)
        parameters, buffers = sum(m.parameter_bytes for m in memory), sum(m.buffer_bytes for m in memory)
        optimizer = sum(m.optimizer_bytes for m in memory)
        return _StateBytes(parameters, max(0, total - parameters - buffers - optimizer), buffers, total)


@dataclass(frozen=True)
class _StateBytes:
    """What all devices hold from step to step; gradients as when all are there."""

    parameters: int
    gradients: int
    buffers: int
    total: int


def device_counts(name: str, *, more_than: int, per_host: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield how many devices of a kind there may be, and the machine's text: up to one host's, then whole hosts."""
    own = per_host or registry.device(name).peer_group or _PER_HOST
    for count in range(max(1, more_than + 1), own + 1):
        yield count, f"{count}x{name}"
    for hosts in range(max(2, more_than // own + 1), _MOST_DEVICES // own + 1):
        yield hosts * own, f"{hosts}x{own}x{name}"


def _larger(present: DeviceSpec) -> Sequence[DeviceSpec]:
    """Return the devices of the same maker with more memory, the smallest first."""
    cuda = not (present.compute_capability or "").startswith("gfx")
    others = (registry.device(name) for name in registry.names())
    fitting = [
        spec
        for spec in others
        if (spec.usable_bytes or 0) > (present.usable_bytes or 0)
        and cuda is not (spec.compute_capability or "").startswith("gfx")
    ]
    return sorted(fitting, key=lambda spec: (cast(int, spec.usable_bytes), spec.name))


def _speed(present: DeviceSpec, other: DeviceSpec) -> float:
    """Return how long work takes on another device beside this one: by arithmetic or memory, whichever is longer."""
    dtype = next((kind for kind in ("bf16", "fp16", "fp32") if kind in present.dtypes and kind in other.dtypes), "fp32")
    arithmetic = present.peak(dtype) / other.peak(dtype)  # type: ignore[arg-type]
    return max(arithmetic, present.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s)
