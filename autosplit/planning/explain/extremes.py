"""The fewest devices that hold a model, and the largest batch that some hold: searches over whole plans.

What fits with some devices fits with more, what fits of a batch fits of a smaller one. Quick searches say where to
look, and a few whole plans around there find the edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autosplit.checks import resolve_machine
from autosplit.errors import DeviceError, InputError
from autosplit.planning.explain.changes import MOST_DEVICES, Request, device_counts, least
from autosplit.planning.explain.verdicts import binding
from autosplit.planning.plan.plan import Plan
from autosplit.planning.request.paper import OnPaper, stand_ins
from autosplit.planning.search.choose import Space
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.units import format_bytes

MOST_ROWS = 2**20
"""Of one microbatch."""

SpaceOf = Callable[[OnPaper], Space]


@dataclass(frozen=True)
class Extreme:
    """The plan at the edge, what it was made for, and what is just beyond: in words."""

    plan: Plan
    paper: OnPaper
    words: str


class _Edge:
    """Requests by a number, from some number on none of which fits, or all do; each is planned once."""

    def __init__(self, request: Callable[[int], Request]) -> None:
        self.request = request
        self._plans: dict[int, Plan] = {}

    def plan(self, number: int) -> Plan:
        """Return the plan of a number."""
        if number not in self._plans:
            self._plans[number] = self.request(number).plan()
        return self._plans[number]

    def fits(self, number: int) -> bool:
        """Tell whether the plan of a number surely fits."""
        return self.plan(number).verdict == "fits"

    def ratio(self, number: int, *, like: Plan) -> float:
        """Return how full the fullest device is at least, relative to its limit, with the chunks of another plan."""
        if binding(like) is None:  # without a known capacity nothing surely fits
            return math.inf
        leanest = self.request(number).narrowed(like).search().min_memory_cut()
        return math.inf if leanest is None else leanest.fullest


def smallest(paper: OnPaper, space_of: SpaceOf) -> Extreme:
    """Return the plan for the fewest devices of the machine's kind that surely hold the model.

    Devices come one by one up to one host, then as whole hosts, 256 at most. ``space_of`` says what is searched for a
    machine. Where no number will do, it is the plan for the most. Raises DeviceError where the machine has devices of
    several kinds, and InputError where something was asked for that is made for one number of them.
    """
    counts, rows = _counts(paper), batch_rows(paper.found.inputs)

    def request(index: int) -> Request:
        machine = resolve_machine(counts[index].text)
        own = replace(paper, options=replace(paper.options, machine=machine, devices=stand_ins(machine)))
        return Request(own, space_of(own), rows)

    edge = _Edge(request)
    given = next((place for place, own in enumerate(counts) if own.devices >= len(paper.options.devices)), 0)
    first = edge.plan(given)
    parts = len(first.units) or sum(len(stage.nodes) for stage in first.stages)
    top = max(place for place, own in enumerate(counts) if own.devices <= max(parts, 1))
    near = least(lambda place: edge.ratio(place, like=first) <= 1.0, guess=given, low=0, high=top)
    index = least(edge.fits, guess=top if near is None else near, low=0, high=top)
    if index is None:
        words = f"no number of {counts[0].name} holds the model: with {counts[top].text}, {_binds(edge.plan(top))}"
        return Extreme(edge.plan(top), request(top).paper, words)
    words = f"{counts[index].text} is the least that holds the model"
    if index:
        words += f": with {counts[index - 1].text}, {_binds(edge.plan(index - 1))}"
    return Extreme(edge.plan(index), request(index).paper, words)


def largest_batch(paper: OnPaper, space: Space) -> Extreme:
    """Return the plan for the largest batch that surely fits, in the plan's number of microbatches.

    The number is the one that was asked for, else the one that is best for the sample's batch. Where not even the
    smallest batch fits, it is the plan for that. Raises InputError for a sample without a batch.
    """
    first = Request(paper, space, batch_rows(paper.found.inputs)).plan()
    chunks = space.chunks[0] if len(space.chunks) == 1 else len(first.microbatch_rows)
    if all(stage.memory.capacity_bytes is None for stage in first.stages):
        raise InputError("no capacity is known, so any batch fits; give memory_limit=, or devices with a known memory")
    edge = _Edge(lambda each: Request(paper, replace(space, chunks=(chunks,)), each * chunks))
    fewest, present = paper.found.graph.min_rows, max(first.microbatch_rows)
    near = last(lambda each: edge.ratio(each, like=first), at=present, low=fewest, high=MOST_ROWS)
    beyond = least(lambda each: not edge.fits(each), guess=near + 1, low=fewest, high=MOST_ROWS)
    if beyond is None:
        return Extreme(edge.plan(MOST_ROWS), paper, f"{MOST_ROWS * chunks} rows still fit")
    binds, most = _binds(edge.plan(beyond)), beyond - 1
    if most < fewest:
        words = f"not even {fewest * chunks} rows in {_microbatches(chunks)} fit: {binds}"
        return Extreme(edge.plan(fewest), paper, words)
    words = (
        f"the largest batch that fits in {_microbatches(chunks)} is {most * chunks} rows, {most} in each: with "
        f"{beyond}, {binds}; more microbatches of as many rows need hardly more memory"
    )
    return Extreme(edge.plan(most), paper, words)


def last(ratio: Callable[[int], float], *, at: int, low: int, high: int) -> int:
    """Return the last number from ``low`` to ``high`` whose ratio is 1 at most; ``low - 1`` where none is.

    The ratio never falls, and grows about as a line does: where that would be 1 is looked at next, each third time the
    middle.
    """
    known: dict[int, float] = {}
    below, above = low - 1, high + 1
    while below + 1 < above:
        known[at] = ratio(at)
        below, above = (at, above) if known[at] <= 1.0 else (below, at)
        middle = len(known) % 3 == 0 and below >= low and above <= high
        at = min(max((below + above) // 2 if middle else _crossing(known), below + 1), above - 1)
    return below


def _crossing(known: dict[int, float]) -> int:
    """Return where a line through the two nearest to a ratio of 1, one on each side if there are such, would be 1.

    One alone is taken for proportional.
    """
    under = sorted(at for at, ratio in known.items() if ratio <= 1.0)[-2:]
    over = sorted(at for at, ratio in known.items() if ratio > 1.0)[:2]
    points = [*under[-1:], *over[:1]] if under and over else under or over
    start, end = points[0], points[-1]
    rise = known[end] - known[start]
    if start == end:
        return int(start / max(known[start], 0.01))
    if rise <= 0.0:
        return 2 * end if under else start // 2
    return int(start + (1.0 - known[start]) * (end - start) / rise)


@dataclass(frozen=True)
class _Count:
    devices: int
    text: str
    name: str


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
    return [_Count(count, text, names[0]) for count, text in found if count <= MOST_DEVICES]


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
