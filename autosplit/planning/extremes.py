"""The fewest devices that hold a model, and the largest batch that some hold: searches over whole plans.

What fits with some devices fits with more, what fits of a batch fits of a smaller one. So a plan's own units say where
to look, and a few whole plans around there find the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from autosplit.checks import resolve_machine
from autosplit.errors import DeviceError, InputError
from autosplit.memory.pieces import Recompute
from autosplit.planning.batches import Batches
from autosplit.planning.choose import Choice, Space
from autosplit.planning.hardware import device_counts
from autosplit.planning.paper import OnPaper, stand_ins
from autosplit.planning.plan import Plan
from autosplit.planning.sketch import Setting, Sketch
from autosplit.planning.sweep import Shared, Sweep
from autosplit.planning.verdicts import binding
from autosplit.trace.inputs import batch_rows
from autosplit.units import format_bytes

MOST_DEVICES = 256
MOST_ROWS = 2**20
"""Of one microbatch."""

SpaceOf = Callable[[OnPaper], Space]


@dataclass(frozen=True)
class Extreme:
    """The plan at the edge, what it was made for, and what is just beyond: in words."""

    plan: Plan
    paper: OnPaper
    words: str


def smallest(paper: OnPaper, space_of: SpaceOf) -> Extreme:
    """Return the plan for the fewest devices of the machine's kind that surely hold the model.

    Devices come one by one up to one host, then as whole hosts, 256 at most. ``space_of`` says what is searched for a
    machine. Where no number will do, it is the plan for the most. Raises DeviceError where the machine has devices of
    several kinds, and InputError where something was asked for that is made for one number of them.
    """
    counts, shared = _counts(paper), Shared(paper.found)
    made: dict[int, Plan] = {}

    def there(index: int) -> OnPaper:
        machine = resolve_machine(counts[index].text)
        return replace(paper, options=replace(paper.options, machine=machine, devices=stand_ins(machine)))

    def plan(index: int) -> Plan:
        if index not in made:
            own = there(index)
            rows = batch_rows(own.found.inputs)
            made[index] = Choice(Sweep(own.model, own.found, own.options, space_of(own), rows=rows, shared=shared)).plan
        return made[index]

    given = next((place for place, own in enumerate(counts) if own.devices >= len(paper.options.devices)), 0)
    first = plan(given)
    parts = len(first.units) or sum(len(stage.nodes) for stage in first.stages)
    top = max(place for place, own in enumerate(counts) if own.devices <= max(parts, 1))
    guess = min(_guessed_count(first, counts[: top + 1], given), top)
    index = least(lambda place: plan(place).verdict == "fits", guess=guess, low=0, high=top)
    if index is None:
        words = f"no number of {_name(paper)} holds the model: with {counts[top].text}, {_binds(plan(top))}"
        return Extreme(plan(top), there(top), words)
    words = f"{counts[index].text} is the least that holds the model"
    if index:
        words += f": with {counts[index - 1].text}, {_binds(plan(index - 1))}"
    return Extreme(plan(index), there(index), words)


def largest_batch(paper: OnPaper, space: Space) -> Extreme:
    """Return the plan for the largest batch that surely fits, in the plan's number of microbatches.

    The number is the one that was asked for, else the one that is best for the sample's batch. Where not even the
    smallest batch fits, it is the plan for that. Raises InputError for a sample without a batch.
    """
    rows, shared = batch_rows(paper.found.inputs), Shared(paper.found)
    first = Choice(Sweep(paper.model, paper.found, paper.options, space, rows=rows, shared=shared)).plan
    chunks = space.chunks[0] if len(space.chunks) == 1 else len(first.microbatch_rows)
    fewest = paper.found.graph.min_rows
    if all(stage.memory.capacity_bytes is None for stage in first.stages):
        raise InputError("no capacity is known, so any batch fits; give memory_limit=, or devices with a known memory")
    batches = Batches(paper, space, chunks, fewest, MOST_ROWS, shared)
    most = batches.largest(guess=min(_guessed_rows(first, fewest), MOST_ROWS))
    if most == MOST_ROWS:
        return Extreme(batches.plan(most), paper, f"{MOST_ROWS * chunks} rows still fit")
    if most < fewest:
        plan = batches.plan(fewest)
        return Extreme(plan, paper, f"not even {fewest * chunks} rows in {_microbatches(chunks)} fit: {_binds(plan)}")
    words = (
        f"the largest batch that fits in {_microbatches(chunks)} is {most * chunks} rows, {most} in each: with "
        f"{most + 1}, {_binds(batches.plan(most + 1))}; more microbatches of as many rows need hardly more memory"
    )
    return Extreme(batches.plan(most), paper, words)


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


@dataclass(frozen=True)
class _Count:
    devices: int
    text: str


def _counts(paper: OnPaper) -> list[_Count]:
    """Return the machines of the kind that was given, the smallest first."""
    machine, options = paper.options.machine, paper.options
    assert machine is not None
    names = list(dict.fromkeys(spec.name for spec in machine.devices))
    if len(names) > 1:
        raise DeviceError(f"{machine.name} has devices of {len(names)} kinds; name one, such as 8x{names[0]}")
    if options.actions or len(options.recompute or ()) > 1:
        what = "an action file" if options.actions else "a recompute per stage"
        raise InputError(f"{what} is made for one number of devices; leave it out to search for the fewest")
    hosts = machine.host_devices
    found = device_counts(names[0], more_than=0, per_host=hosts[0] if len(hosts) > 1 else None)
    return [_Count(count, text) for count, text in found if count <= MOST_DEVICES]


def _guessed_count(plan: Plan, counts: Iterable[_Count], otherwise: int) -> int:
    """Return the place of the first count that is estimated to hold the plan's model."""
    if not plan.units:
        return otherwise
    sketch = Sketch(plan)
    for place, own in enumerate(counts):
        best = sketch.best(list(_settings(sketch, devices=own.devices)))
        if best is not None and best.verdict in ("fits", None):
            return place
    return otherwise


def _guessed_rows(plan: Plan, fewest: int) -> int:
    """Return the rows of a microbatch from which on it is estimated not to fit."""
    present = max(plan.microbatch_rows)
    if not plan.units:
        return present + 1
    sketch = Sketch(plan)

    def over(rows: int) -> bool:
        best = sketch.best(list(_settings(sketch, rows=rows)))
        return best is None or best.verdict not in ("fits", None)

    return least(over, guess=present + 1, low=fewest, high=MOST_ROWS) or MOST_ROWS


def _settings(sketch: Sketch, **fields: int) -> Iterator[Setting]:
    """Yield the plan's setting with other numbers, under every recompute."""
    own = replace(sketch.setting(), **cast(Any, fields))
    yield from (replace(own, recompute=kind) for kind in get_args(Recompute))


def _name(paper: OnPaper) -> str:
    assert paper.options.machine is not None
    return paper.options.machine.devices[0].name


def _microbatches(count: int) -> str:
    return "one microbatch" if count == 1 else f"{count} microbatches"


def _binds(plan: Plan) -> str:
    """Return which device has too little, and of what."""
    device = binding(plan)
    if device is None:
        return "no capacity is known"
    high = f" (up to {format_bytes(device.high_bytes)})" if device.high_bytes > device.peak_bytes else ""
    needs, has = format_bytes(device.peak_bytes), format_bytes(device.capacity_bytes or 0)
    if needs == has and not high:
        needs = f"{device.peak_bytes:,} bytes"
    free = f", {format_bytes(device.reserve_bytes)} of them in reserve" if device.reserve_bytes else ""
    return f"device {device.lane} needs {needs}{high} of {has}{free}, most of it {device.term}"
