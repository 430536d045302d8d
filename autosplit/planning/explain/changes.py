"""What would make a plan fit that does not: the least change of every kind, with its price, as the planner finds it.

Whether a change is enough is told by the cuts that need the least, replayed, with as many chunks as the plan has; its
price is that of the fastest cut that keeps the limits by the formula. Kinds come in the order of what they ask of the
caller: the same numbers in more time, another batch, other hardware, other numbers. Where no change is enough alone,
two are tried together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, takewhile
from typing import Literal, cast

from autosplit.checks import resolve_machine
from autosplit.errors import TraceError
from autosplit.planning.explain.verdicts import binding
from autosplit.planning.paper import OnPaper, in_precision, stand_ins
from autosplit.planning.plan.fields import Change
from autosplit.planning.plan.plan import Plan
from autosplit.planning.search.choose import HOPELESS, PlanChoice, Search
from autosplit.planning.search.finish import Finished
from autosplit.planning.search.lineup import lined_up
from autosplit.planning.search.sweep import Space
from autosplit.units import format_bytes, format_seconds
from cost_models import registry
from cost_models.specs import DeviceSpec

Kind = Literal["recompute", "chunks", "schedule", "devices", "batch", "optimizer", "precision", "device", "pair"]
Arguments = Mapping[str, str | int]

_ORDER = {"recompute": 0, "chunks": 0, "schedule": 0, "batch": 1, "devices": 2, "optimizer": 3, "precision": 3}
"""What a change of an argument asks of the caller, the least first."""


@dataclass(frozen=True)
class ChangeCandidate:
    """One change, or two: what they are called, and the arguments of `plan` that say it."""

    kind: Kind
    words: str
    arguments: dict[str, str | int]
    note: str = ""


@dataclass(frozen=True)
class Request:
    """What is planned: the recorded model and devices, the space of choices, and the rows of a batch."""

    paper: OnPaper
    space: Space
    rows: int

    def plan(self) -> Plan:
        """Return the best plan, with the others that are worth a look as its ``frontier``.

        If none fits, returns the plan that comes closest, with the verdict "no". Raises InputError if no entry of the
        space can be built for the devices.
        """
        return PlanChoice(self.search()).plan

    def lined_up(self) -> tuple[Request, PlanChoice]:
        """Return the request with the devices that take part in their best order, and the choice of its plan."""
        search = lined_up(self.paper.sweep(self.space, rows=self.rows))
        return replace(self, paper=replace(self.paper, options=search.sweep.options)), PlanChoice(search)

    def search(self) -> Search:
        """Return the search for a cut."""
        return Search(self.paper.sweep(self.space, rows=self.rows))

    def narrowed(self, plan: Plan) -> Request:
        """Return the request with the chunks of a plan."""
        chunks = self.space.chunks if len(self.space.chunks) == 1 else (plan.chunks,)
        return replace(self, space=replace(self.space, chunks=chunks))

    def changed(self, arguments: Arguments, *, chunks: int) -> Request:
        """Return the request with other arguments of `plan`.

        ``batch`` are the rows of another batch, in ``chunks`` microbatches. Another precision is recorded anew.
        """
        paper, space, rows = self.paper, self.space, self.rows
        for name, value in arguments.items():
            if name == "devices":
                machine = resolve_machine(value)
                options = paper.options
                kept = options.replicas if not options.replicas or sum(options.replicas) == len(machine) else ()
                devices, limit = stand_ins(machine), options.memory_limit
                limit = limit[0] if isinstance(limit, tuple) else limit  # of devices that are alike
                options = replace(options, machine=machine, devices=devices, replicas=kept, memory_limit=limit)
                paper = replace(paper, options=options)
            elif name == "optimizer":
                paper = replace(paper, options=replace(paper.options, optimizer=value))
            elif name == "precision":
                paper = in_precision(paper, str(value))
            elif name == "recompute":
                space = replace(space, recompute=(str(value),))
            elif name == "chunks":
                space = replace(space, chunks=(int(value),))
            elif name == "schedule":
                space = replace(space, schedules=((str(value), 1),))
            else:
                rows, space = int(value), replace(space, chunks=(chunks,))
        return Request(paper, space, rows)


def changes(plan: Plan, request: Request) -> tuple[Change, ...]:
    """Return the changes, one of a kind at most, that would make a plan fit, those that ask the least first.

    Where none of them surely fits, the first pair that does follows. Empty for a plan that fits, and where no capacity
    is known.
    """
    if plan.verdict == "fits" or binding(plan) is None:
        return ()
    trials = _Trials(plan, request)
    single = [change for change in map(trials.least_of, trials.kinds) if change is not None]
    if all(change.verdict != "fits" for change in single) and (pair := _pair(trials)) is not None:
        single.append(pair)
    return tuple(sorted(single, key=lambda change: _price(change, request.rows)))


def tried(plan: Plan, request: Request) -> str:
    """Return what was tried where nothing would make a plan fit, in words."""
    words = [of_kind[-1].words for of_kind in _Trials(plan, request).kinds]
    if not words:
        return "nothing was left to try that would make it fit: all that plan() can change was given"
    return f"nothing that was tried would make it fit, alone or two together, up to: {'; '.join(words)}"


def least(holds: Callable[[int], bool], *, guess: int, low: int, high: int) -> int | None:
    """Return the least number from ``low`` to ``high`` that holds, None where none does.

    From one that holds on all do. The steps grow from ``guess``, so that few calls are needed where it is near.
    """
    below, above, step = low - 1, high + 1, 1
    at = min(max(guess, low), high)
    while below + 1 < above:
        if holds(at):
            above = at
        else:
            below = at
        if below >= low and above <= high:
            at = (below + above) // 2
        else:
            at = max(low, above - step) if above <= high else min(high, below + step)
            step *= 2
    return above if above <= high else None


class _Trials:
    """The changes of each kind, those that change the least first, and what the planner says of them."""

    def __init__(self, plan: Plan, request: Request) -> None:
        self.plan, self.request = plan, request.narrowed(plan)
        self.kinds = [candidates for candidates in (list(make(plan, request)) for make in _KINDS) if candidates]
        """The candidates of each kind that has some."""
        self._leanest: dict[str, tuple[Search, Finished | None] | None] = {}

    def least_of(self, candidates: Sequence[ChangeCandidate]) -> Change | None:
        """Return the least change of several that surely fits; else the last, where that may."""
        index = least(lambda index: self.fits(candidates[index]), guess=0, low=0, high=len(candidates) - 1)
        return self._change(candidates[-1 if index is None else index])

    def fits(self, candidate: ChangeCandidate) -> bool:
        """Tell whether a change makes some cut fit for sure."""
        tried = self._min_memory_cut(candidate)
        return tried is not None and tried[1] is not None and tried[1].sure

    def _min_memory_cut(self, candidate: ChangeCandidate) -> tuple[Search, Finished | None] | None:
        """Return the search with a change, and the cut of it that needs the least; None where it cannot be recorded."""
        words = candidate.words
        if words not in self._leanest:
            try:
                search = self.request.changed(candidate.arguments, chunks=self.plan.chunks).search()
                self._leanest[words] = search, search.min_memory_cut(fullest=HOPELESS)
            except TraceError:  # in that precision
                self._leanest[words] = None
        return self._leanest[words]

    def _change(self, candidate: ChangeCandidate) -> Change | None:
        """Return a change that may fit and its price: by the formula the fastest cut's, else the replayed one's."""
        tried = self._min_memory_cut(candidate)
        search, leanest = tried or (None, None)
        if search is None or leanest is None or leanest.verdict == "no":
            return None
        step_s, peak_bytes = leanest.step_s, max(leanest.peaks)
        if (best := search.fastest()) is not None and best.step_s < step_s:
            step_s, peak_bytes = best.step_s, max(best.cut.device_bytes)
        fits = "" if leanest.verdict == "fits" else ", borderline"
        need = f"about {format_bytes(peak_bytes)} on the fullest device{fits}"
        return Change(
            kind=candidate.kind,
            text=f"{candidate.words}: {need}, {self._longer(candidate, step_s, search.sweep.rows)}{candidate.note}",
            arguments=candidate.arguments,
            step_s=step_s,
            peak_bytes=peak_bytes,
            verdict=leanest.verdict,
        )

    def _longer(self, candidate: ChangeCandidate, step_s: float, rows: int) -> str:
        """Return the price in time; of a batch of another size, per row."""
        before_s = self.plan.step_s / sum(self.plan.microbatch_rows)
        ratio = step_s / rows / before_s if before_s else 1.0
        of = f"the step about {format_seconds(step_s)}," + (" per row" if "batch" in candidate.arguments else "")
        if abs(ratio - 1) < 0.005:
            return f"{of} as long"
        if ratio >= 2:
            return f"{of} {ratio:.1f} times as long"
        return f"{of} {abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'}"


def _pair(trials: _Trials) -> Change | None:
    """Return the first two changes that surely fit together: the most of one kind, and the least of another with it."""
    pairs = sorted(combinations(trials.kinds, 2), key=lambda pair: max(_asks(kind[0].arguments) for kind in pair))
    for first, second in pairs:
        joined = [pair for candidate in second if (pair := _joined(first[-1], candidate)) is not None]
        if joined and trials.fits(joined[-1]):
            return trials.least_of(joined)
    return None


def _joined(first: ChangeCandidate, second: ChangeCandidate) -> ChangeCandidate | None:
    """Return two changes as one; None where both change the same."""
    arguments = {**first.arguments, **second.arguments}
    if len(arguments) < 2 or arguments.keys() == {"batch", "chunks"}:
        return None
    return ChangeCandidate("pair", f"{first.words} and {second.words}", arguments, first.note + second.note)


def _asks(arguments: Arguments) -> int:
    """Return what a change asks of the caller, as a place in the order."""
    return max(_ORDER[name] for name in arguments)


def _price(change: Change, rows: int) -> tuple[int, bool, float]:
    return _asks(change.arguments), change.verdict != "fits", change.step_s / int(change.arguments.get("batch", rows))


def _recompute(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    if request.space.recompute is not None and "activations" not in plan.offload:
        for kind in ("block", "always"):
            yield ChangeCandidate("recompute", f'recompute="{kind}"', {"recompute": kind})


def _chunks(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    chunks = len(plan.microbatch_rows) * 2
    while len(request.space.chunks) == 1 and not plan.schedule_rows and chunks <= request.rows:
        yield ChangeCandidate("chunks", f"chunks={chunks}", {"chunks": chunks})
        chunks *= 2


def _schedule(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    if len(request.space.schedules) == 1 and plan.schedule not in ("1f1b", "forward"):
        yield ChangeCandidate("schedule", 'schedule="1f1b"', {"schedule": "1f1b"})


def _batch(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    """A smaller microbatch, as many of them."""
    for rows in range(max(plan.microbatch_rows) - 1, 0, -1):
        total = rows * len(plan.microbatch_rows)
        yield ChangeCandidate("batch", f"a batch of {total} rows", {"batch": total})


def _kinds_of_device(request: Request) -> list[str]:
    machine, limits = request.paper.options.machine, request.paper.options.memory_limit
    if machine is None or isinstance(limits, tuple):
        return []
    return list(dict.fromkeys(spec.name for spec in machine.devices))


def _devices(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    names, planned = _kinds_of_device(request), len(request.paper.options.devices)
    if (
        plan.schedule_rows
        or request.paper.options.replicas
        or len(names) != 1
        or len(request.space.recompute or ()) > 1
    ):
        return
    most = sum(len(stage.nodes) for stage in plan.stages)
    for count, text in takewhile(lambda pair: pair[0] <= most, device_counts(names[0], more_than=planned)):
        yield ChangeCandidate("devices", text, {"devices": text}, f", {count / planned:.3g} times the devices")


def _device(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    options = request.paper.options
    if options.machine is not None and options.memory_limit is None and len(_kinds_of_device(request)) == 1:
        for spec in larger(options.machine.devices[0]):
            text = f"{len(options.devices)}x{spec.name}"
            yield ChangeCandidate("device", text, {"devices": text})


def _optimizer(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    if plan.optimizer in ("adam", "adamw"):
        for name in ("adamw8bit", "lion", "adafactor", "sgd"):
            yield ChangeCandidate("optimizer", f'optimizer="{name}"', {"optimizer": name}, "; it trains otherwise")


def _precision(plan: Plan, request: Request) -> Iterator[ChangeCandidate]:
    names: tuple[str, ...] = ("bf16_fp32_master", "bf16")
    if plan.precision in names or plan.dtype in ("bfloat16", "float16"):
        names = ("bf16",) if plan.precision == "bf16_fp32_master" else ()
    for name in names if plan.parameters and not request.paper.by_values else ():
        yield ChangeCandidate("precision", f'precision="{name}"', {"precision": name}, "; other rounding")


_KINDS = (_recompute, _chunks, _schedule, _batch, _devices, _device, _optimizer, _precision)


_MOST_DEVICES = 256
_PER_HOST = 8


def device_counts(name: str, *, more_than: int, per_host: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield how many devices of a kind there may be, and the machine's text: up to one host's, then whole hosts.

    They are 256 at most.
    """
    each = per_host or registry.device(name).peer_group or _PER_HOST
    for count in range(max(1, more_than + 1), each + 1):
        yield count, f"{count}x{name}"
    for hosts in range(max(2, more_than // each + 1), _MOST_DEVICES // each + 1):
        yield hosts * each, f"{hosts}x{each}x{name}"


def larger(present: DeviceSpec) -> Sequence[DeviceSpec]:
    """Return the devices of the same maker with more memory and no less arithmetic of 16 bits, the smallest first."""
    cuda = not (present.compute_capability or "").startswith("gfx")
    others = (registry.device(name) for name in registry.names())
    fitting = [
        spec
        for spec in others
        if (spec.usable_bytes or 0) > (present.usable_bytes or 0)
        and cuda is not (spec.compute_capability or "").startswith("gfx")
        and {"fp16", "bf16"}.intersection(present.dtypes) <= {*spec.dtypes}
    ]
    return sorted(fitting, key=lambda spec: (cast(int, spec.usable_bytes), spec.name))
