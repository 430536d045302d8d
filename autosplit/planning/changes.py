"""What would make a plan fit that does not: the cheapest change of every kind, with its price.

Each kind is estimated on the plan's units, the least change that fits is kept, and where there is a way to plan anew
it is planned, so that what is listed holds. Kinds come in the order of what they ask of the caller: the same numbers
in more time, another batch, other hardware, other numbers. Where none is enough alone, two of them are tried together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Literal, cast

from autosplit.options import Options
from autosplit.planning.choose import Space
from autosplit.planning.hardware import device_counts, larger, slowdown
from autosplit.planning.plan import Plan
from autosplit.planning.records import Change
from autosplit.planning.sketch import Setting, Sketch
from autosplit.planning.verdicts import Verdict
from autosplit.units import format_bytes, format_seconds

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
_PAIRS, _ENDS = 3, 64
"""So many pairs of changes are named; of a kind so many changes are tried in pairs, from the least on."""
_FEW = 4
_PLANNED = 3
"""So many of the estimates are planned anew."""


@dataclass(frozen=True)
class _Candidate:
    """One change, or two: what they are called, the arguments that say it, and the fields of a setting that change."""

    kinds: tuple[Kind, ...]
    words: str
    arguments: dict[str, str | int]
    fields: dict[str, object]
    note: str = ""

    @property
    def group(self) -> int:
        """What it asks of the caller, as a place in the order."""
        return max(place for place, kinds in enumerate(_ORDER) for kind in self.kinds if kind in kinds)


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

    Where none of them surely fits, pairs follow.

    ``options`` and ``space`` are what the plan was chosen under. ``replan`` plans anew with other arguments of `plan`
    (``batch`` stands for the rows of the sample), None where it cannot; without it all figures are estimates. Empty
    for a plan that fits, and for one without units.
    """
    if plan.verdict == "fits" or not plan.units:
        return ()
    sketch = Sketch(plan)
    listed = _Kinds(plan, options, space, sketch)
    found = [own for own in (_first(listed, of_kind) for of_kind in listed.all()) if own is not None]
    if all(own.verdict != "fits" for own in found):
        found += islice(_pairs(listed, {kind for own in found for kind in own.candidate.kinds}), _PAIRS)
    found.sort(key=_price)
    if replan is not None:
        found = [*filter(None, (_planned(own, replan) for own in found[:_PLANNED])), *found[_PLANNED:]]
        found.sort(key=_price)
    return tuple(_change(plan, own) for own in found)


def tried(plan: Plan, options: Options, space: Space) -> str | None:
    """Return what was tried where nothing would make a plan fit, in words; None for a plan without units."""
    if not plan.units:
        return None
    kinds = [list(islice(of_kind, _ENDS)) for of_kind in _Kinds(plan, options, space, Sketch(plan)).all()]
    words = [own[-1].words for own in kinds if own]
    if not words:
        return "nothing was left to try that would make it fit: all that plan() can change was given"
    return f"nothing that was tried would make it fit, alone or two together, up to: {'; '.join(words)}"


def _first(listed: _Kinds, candidates: Iterator[_Candidate]) -> _Found | None:
    """Return the first candidate that fits; else the first that may."""
    borderline = None
    for candidate in candidates:
        found = listed.estimated(candidate)
        if found is None:
            continue
        if found.verdict != "borderline":
            return found
        borderline = borderline or found
    return borderline


def _pairs(listed: _Kinds, enough: set[Kind]) -> Iterator[_Found]:
    """Yield pairs of changes of two kinds that fit together, those that ask the least first.

    Kinds that may be ``enough`` alone are left to that, but for a pair that surely fits.
    """
    kinds = [own for own in (list(filter(listed.possible, islice(each, _ENDS))) for each in listed.all()) if own]
    pairs = [pair for pair in combinations(kinds, 2) if _joined(pair[0][0], pair[1][0])]
    for pair in sorted(pairs, key=lambda own: max(own[0][0].group, own[1][0].group)):
        found = _least_pair(listed, *sorted(pair, key=len))
        if found is not None and (found.verdict == "fits" or not enough & set(found.candidate.kinds)):
            yield found


def _least_pair(listed: _Kinds, few: Sequence[_Candidate], many: Sequence[_Candidate]) -> _Found | None:
    """Return the cheapest pair of two kinds: with a few of one kind the least of the other, which fits from one on."""
    joined = [[_joined(own, other) for other in many] for own in few[:: -(-len(few) // _FEW)]]
    rows = [[pair for pair in row if pair is not None] for row in joined]
    for surely in (True, False):
        least = (_least(listed, row, surely=surely) for row in rows)
        found = [own for own in (listed.estimated(pair) for pair in least if pair is not None) if own is not None]
        if found:
            return min(found, key=_price)
    return None


def _least(listed: _Kinds, row: Sequence[_Candidate], *, surely: bool) -> _Candidate | None:
    """Return the first of several that fits; of many, where those behind one that fits do too."""
    if len(row) <= _FEW:
        return next((own for own in row if listed.holds(own, surely=surely)), None)
    if not listed.holds(row[-1], surely=surely):
        return None
    low, high = 0, len(row) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if listed.holds(row[middle], surely=surely) else (middle + 1, high)
    return row[low]


def _joined(first: _Candidate, second: _Candidate) -> _Candidate | None:
    """Return two changes as one; None where both change the same."""
    shared = first.fields.keys() & second.fields.keys() - {"seconds"}
    if shared or first.arguments.keys() & second.arguments.keys():
        return None
    first, second = sorted((first, second), key=lambda own: own.group)
    fields = {**first.fields, **second.fields}
    seconds = [cast(float, own.fields.get("seconds", 1.0)) for own in (first, second)]
    if "seconds" in fields:
        fields["seconds"] = seconds[0] * seconds[1]
    return _Candidate(
        (*first.kinds, *second.kinds),
        f"{first.words} and {second.words}",
        {**first.arguments, **second.arguments},
        fields,
        first.note + second.note,
    )


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
    return own.candidate.group, own.verdict != "fits", own.step_s / max(own.rows, 1)


def _change(plan: Plan, own: _Found) -> Change:
    about = "" if own.planned else "about "
    fits = "" if own.verdict == "fits" else ", borderline"
    text = (
        f"{own.candidate.words}: {about}{format_bytes(own.peak_bytes)} on the fullest device{fits}, "
        f"{_longer(plan, own)}{own.candidate.note}"
    )
    return Change(
        kind=own.candidate.kinds[0] if len(own.candidate.kinds) == 1 else "pair",
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
    of = f"the step {about}{format_seconds(own.step_s)}," + (" per row" if "batch" in own.candidate.kinds else "")
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

    def estimated(self, candidate: _Candidate) -> _Found | None:
        """Return what a change would come to; None where it does not fit."""
        best = self.sketch.best(self._settings(candidate.fields))
        if best is None:
            return None
        rows = best.setting.rows * best.setting.microbatches
        return _Found(candidate, best.step_s, best.peak_bytes, best.verdict or "fits", rows)

    def holds(self, candidate: _Candidate, *, surely: bool) -> bool:
        """Tell whether a change fits, or may."""
        return any(self.sketch.holds(setting, surely=surely) for setting in self._settings(candidate.fields))

    def possible(self, candidate: _Candidate) -> bool:
        """Tell whether there are enough units for its devices."""
        devices = cast(int, candidate.fields.get("devices", self.own.devices))
        return devices * self.own.virtual_stages <= len(self.sketch.units)

    def _settings(self, fields: Mapping[str, object]) -> tuple[Setting, ...]:
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
                fields: dict[str, object] = {"recompute": kind}
                yield _Candidate(("recompute",), f'recompute="{kind}"', {"recompute": kind}, fields)

    def _chunks(self) -> Iterator[_Candidate]:
        chunks = self.own.microbatches * 2
        while len(self.space.chunks) == 1 and chunks <= self.rows:
            fields: dict[str, object] = {"microbatches": chunks, "rows": -(-self.rows // chunks)}
            yield _Candidate(("chunks",), f"chunks={chunks}", {"chunks": chunks}, fields)
            chunks *= 2

    def _schedule(self) -> Iterator[_Candidate]:
        if len(self.space.schedules) == 1 and self.plan.schedule not in ("1f1b", "forward"):
            fields: dict[str, object] = {"schedule": "1f1b", "virtual_stages": 1}
            yield _Candidate(("schedule",), 'schedule="1f1b"', {"schedule": "1f1b"}, fields)

    def _batch(self) -> Iterator[_Candidate]:
        """A smaller microbatch, as many of them."""
        for rows in range(self.own.rows - 1, 0, -1):
            total = rows * self.own.microbatches
            yield _Candidate(("batch",), f"a batch of {total} rows", {"batch": total}, {"rows": rows})

    def _devices(self) -> Iterator[_Candidate]:
        if self.plan.actions or self.options.machine is None:
            return
        names = {spec.name for spec in self.options.machine.devices}
        if len(names) > 1:
            return
        [name] = names
        for count, text in device_counts(name, more_than=self.own.devices):
            note = f", {count / self.own.devices:.3g} times the devices"
            yield _Candidate(("devices",), text, {"devices": text}, {"devices": count}, note)

    def _device(self) -> Iterator[_Candidate]:
        machine = self.options.machine
        if machine is None or self.options.memory_limit is not None or len({s.name for s in machine.devices}) > 1:
            return
        present = machine.devices[0]
        for spec in larger(present):
            text = f"{self.own.devices}x{spec.name}"
            usable, reserve = spec.usable_bytes or 0, self.options.reserve
            room = max(0, usable - round(reserve * usable if isinstance(reserve, float) else reserve))
            fields: dict[str, object] = {"capacity_bytes": room, "seconds": slowdown(present, spec)}
            yield _Candidate(("device",), text, {"devices": text}, fields)

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
            yield _Candidate(("optimizer",), words, {"optimizer": value}, {"static": share}, note)

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
        fields: dict[str, object] = {"static": share, "kept": kept, "seconds": kept}
        note = "; other rounding"
        return _Candidate(("precision",), f'precision="{name}"', {"precision": name}, fields, note)

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
