"""A chosen plan with its explanation, and the plans for the fewest devices and the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from autosplit.checks import resolve_machine
from autosplit.errors import DeviceError, InputError
from autosplit.planning.explain.changes import Request, changes, device_counts, least, tried
from autosplit.planning.explain.extremes import Extreme, largest_sequence
from autosplit.planning.explain.price import price_of
from autosplit.planning.explain.range import range_of
from autosplit.planning.explain.reasons import reasons
from autosplit.planning.explain.verdicts import binding, device_verdicts
from autosplit.planning.paper import OnPaper, search_space, stand_ins
from autosplit.planning.paper_loss import note_on_no_loss
from autosplit.planning.plan.plan import Plan
from autosplit.planning.search.sweep import Space
from autosplit.progress import phase
from autosplit.units import format_bytes, format_seconds

MOST_ROWS = 2**20
"""Of one microbatch."""
_GUESSES, _GRAINS = 4, 128
"""How many guesses for the largest batch use the cuts of least memory; the batch is found to about 1 / _GRAINS."""

SpaceOf = Callable[[OnPaper], Space]


def _fits(plan: Plan) -> bool:
    return plan.verdict == "fits"


def smallest(paper: OnPaper, space_of: SpaceOf) -> Extreme:
    """Return the plan for the fewest devices of the machine's kind that surely hold the model.

    Devices come one by one up to one host, then as whole hosts, 256 at most. ``space_of`` says what is searched for a
    machine. Where no number will do, it is the plan for the most. Raises DeviceError where the machine has devices of
    several kinds, and InputError where something was asked for that is made for one number of them.
    """
    counts, rows = _counts(paper), paper.recorded.rows

    def request(index: int) -> Request:
        machine = resolve_machine(counts[index][1])
        changed = replace(paper, options=replace(paper.options, machine=machine, devices=stand_ins(machine)))
        return Request(changed, space_of(changed), rows)

    plan = cache(lambda index: request(index).plan())
    asked = len(paper.options.devices)
    start = next((number for number, (devices, _) in enumerate(counts) if devices >= asked), 0)
    parts = len(plan(start).units) or sum(len(stage.nodes) for stage in plan(start).stages)
    top = max(number for number, (devices, _) in enumerate(counts) if devices <= max(parts, 1))
    index = least(lambda number: _fits(plan(number)), guess=start, low=0, high=top)
    if index is None:
        words = f"no number of {plan(top).devices[0]} holds the model: with {counts[top][1]}, {_binds(plan(top))}"
        return Extreme(plan(top), request(top).paper, words)
    words = f"{counts[index][1]} is the least that holds the model"
    if index:
        words += f": with {counts[index - 1][1]}, {_binds(plan(index - 1))}"
    return Extreme(plan(index), request(index).paper, words)


def largest_batch(paper: OnPaper, space: Space) -> Extreme:
    """Return the plan for the largest batch that surely fits, in the plan's number of microbatches, to about 1%.

    The number is the one that was asked for, else the one that is best for the sample's batch. Where not even the
    smallest batch fits, it is the plan for that. Raises InputError for a sample without a batch.
    """
    first = Request(paper, space, paper.recorded.rows).plan()
    chunks = space.chunks[0] if len(space.chunks) == 1 else len(first.microbatch_rows)
    if all(stage.memory.capacity_bytes is None for stage in first.stages):
        raise InputError("no capacity is known, so any batch fits; give memory_limit=, or devices with a known memory")

    def request(each: int) -> Request:
        return Request(paper, replace(space, chunks=(chunks,)), each * chunks)

    plan = cache(lambda each: request(each).plan())
    fewest, near = paper.recorded.trace.graph.min_rows, max(first.microbatch_rows)
    for _ in range(_GUESSES):
        leanest = request(near).search().min_memory_cut()
        near = min(max(int(near / max(leanest.fullest, 1e-6)) if leanest else 0, fewest), MOST_ROWS)
    grain = max(1, near // _GRAINS)
    low, high = -(-fewest // grain), MOST_ROWS // grain
    beyond = least(lambda each: not _fits(plan(each * grain)), guess=near // grain + 1, low=low, high=high)
    if beyond is None:
        return Extreme(plan(high * grain), paper, f"{high * grain * chunks} rows still fit")
    most, full = (beyond - 1) * grain, _binds(plan(beyond * grain))
    if beyond == low:
        words = f"not even {low * grain * chunks} rows in {_microbatches(chunks)} fit: {full}"
        return Extreme(plan(low * grain), paper, words)
    rows = f"{'about ' * (grain > 1)}{most * chunks} rows, {most} in each"
    words = (
        f"the largest batch that fits in {_microbatches(chunks)} is {rows}: with {beyond * grain}, {full}; more "
        "microbatches of as many rows need hardly more memory"
    )
    return Extreme(plan(most), paper, words)


def _counts(paper: OnPaper) -> list[tuple[int, str]]:
    """Return how many devices of the kind that was given there may be, and the machine's text, the fewest first."""
    machine, options = paper.options.machine, paper.options
    assert machine is not None
    names = list(dict.fromkeys(spec.name for spec in machine.devices))
    if len(names) > 1:
        raise DeviceError(f"{machine.name} has devices of {len(names)} kinds; name one, such as 8x{names[0]}")
    if options.actions or len(options.recompute or ()) > 1:
        what = "an action file" if options.actions else "a recompute per stage"
        raise InputError(f"{what} is made for one number of devices; leave it out to search for the fewest")
    hosts = machine.host_devices
    return list(device_counts(names[0], more_than=0, per_host=hosts[0] if len(hosts) > 1 else None))


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


_ROOM = 0.8
"""A device holds a model with room that fills at most this share of what it surely has."""


def answered(paper: OnPaper, *, find: str, free_chunks: bool) -> Plan:
    """Return the best plan, or the one at the edge that is asked for, with its explanation."""
    rows = paper.recorded.rows

    def space_of(case: OnPaper) -> Space:
        return search_space(case.options, rows=rows, free_chunks=free_chunks)

    if find == "best":
        request, choice = Request(paper, space_of(paper), paper.recorded.rows).lined_up()
        best = explained(choice.plan, request)
        return best.model_copy(update={"notes": (*best.notes, *_fewer_microbatches(best, paper, request.space))})
    if find == "largest_sequence":
        edge = largest_sequence(paper, space_of)
    else:
        edge = smallest(paper, space_of) if find == "smallest" else largest_batch(paper, space_of(paper))
    request = Request(edge.paper, space_of(edge.paper), sum(edge.plan.microbatch_rows))
    plan = explained(edge.plan, request)
    return plan.model_copy(update={"reasons": (edge.words, *plan.reasons)})


def assumed(plan: Plan, paper: OnPaper, *, price: float | None = None) -> Plan:
    """Return the plan with range and price, and notes on what nobody said: what stands for the loss, whose values."""
    if plan.mesh is None:
        paper = replace(paper, options=paper.options.as_planned(plan.devices))
    notes: list[str | None] = [] if paper.options.machine is None else list(paper.options.machine.taken)
    if paper.options.loss is None and plan.schedule != "forward":
        notes.append(note_on_no_loss(paper.recorded.trace.graph))
    alone = paper.adapters is None and plan.schedule != "forward"
    if alone and (plan.precision or plan.dtype) in ("bf16", "bfloat16", "float16"):
        notes.append(
            f"trained in {plan.precision or plan.dtype} alone, without fp32 copies of the weights: an update of less "
            'than about 1/256 of a weight is lost; precision="bf16_fp32_master" keeps them, for 12 bytes per parameter '
            "more under Adam"
        )
    if paper.by_values:
        notes.append(
            "the forward decides by values, so the model and inputs were taken with theirs: other values may take "
            "another way through it"
        )
    elif answers := paper.recorded.trace.gathered.scope.answers:
        notes.append(
            f"the forward reads values {'once' if len(answers) == 1 else f'{len(answers)} times'} (first: "
            f"{answers[0].name}); where sizes do not decide them, it is planned for finite values and for masks that "
            "hide something"
        )
    if "optimizer" in plan.offload and plan.schedule != "forward":
        held = format_bytes(12 * (plan.parameters - plan.frozen))
        notes.append(
            f"the hosts hold {held} of fp32 weights and Adam's state, and gradients beside them; autosplit steps on "
            "devices alone: DeepSpeed's CPUAdam is planned, with nothing of it hidden behind the work"
        )
    if plan.parallel.cp * plan.parallel.ep > 1:
        notes.append(
            "autosplit runs no ranks of cp or ep: torchtitan and Megatron-LM do (--export torchtitan-toml, "
            "megatron-args). Keys are gathered beside attention, as torchtitan does; tokens spread evenly over experts"
        )
    asked = {} if paper.adapters is None else paper.adapters.words
    if asked.get("base") and plan.mesh is not None and plan.mesh.tp > 1:
        notes.append("quantised weights lie whole on every tensor-parallel rank, and their products are not shared")
    said = (*plan.notes, *(note for note in notes if note is not None))
    known = range_of(plan, paper)
    return plan.model_copy(update=asked | known | {"notes": said, "price": price_of(plan, price)})


def _fewer_microbatches(plan: Plan, paper: OnPaper, space: Space) -> Iterator[str]:
    """Yield a note where the batch has too few rows for the microbatches that were asked for."""
    used, rows, least = len(plan.microbatch_rows), sum(plan.microbatch_rows), paper.recorded.trace.graph.min_rows
    if len(space.chunks) == 1 and used < space.chunks[0]:
        of = f" of at least {least}" if least > 1 else ""
        yield (
            f"chunks={space.chunks[0]} was asked for, and the batch's {rows} rows make {used} microbatches{of}; "
            f"{space.chunks[0]} take {least * space.chunks[0]} rows or more"
        )


def explained(plan: Plan, request: Request) -> Plan:
    """Return the plan with its reasons, and with changes where it does not surely fit."""
    with phase("pricing changes"):
        helps = changes(plan, request)
        hopeless = tried(plan, request) if plan.verdict == "no" and not helps else None
    others = filter(None, (hopeless, one_is_enough(plan, request)))
    return plan.model_copy(update={"reasons": (*reasons(plan), *others), "changes": helps})


def one_is_enough(plan: Plan, request: Request) -> str | None:
    """Return that one device of the plan's would hold the model with room, and what data parallel over all would take.

    None where it would not, where devices differ, for one stage, and for an evaluation. Every replica takes its share
    of the microbatches; gradients are summed once, in a ring over the slowest link.
    """
    count, rows, links = len(plan.devices), request.rows, request.paper.options.links
    devices = device_verdicts(plan)
    room, states = devices[0].room_bytes, sum(device.states_bytes for device in devices)
    limits = request.paper.options.memory_limit
    kinds = {(name, limits[n] if isinstance(limits, tuple) else limits) for n, name in enumerate(plan.devices)}
    alike = len(kinds) == 1 and plan.schedule != "forward"
    if (
        min(count, len(plan.stages)) < 2
        or rows < count
        or room is None
        or not alike
        or not links
        or states > _ROOM * room
    ):
        return None
    share = -(-rows // count)
    each = min(max(plan.microbatch_rows), share)
    space = Space((-(-share // each),), recompute=("never",))
    single = replace(request, space=space, rows=share).changed({"devices": f"1x{plan.devices[0]}"}, chunks=plan.chunks)
    alone = single.search().fastest()
    if alone is None or (held_bytes := max(alone.cut.device_bytes)) > _ROOM * room:
        return None
    trained = 1 - plan.frozen / plan.parameters
    gradients = round(trained * sum(stage.memory.parameter_bytes for stage in plan.stages))
    ring_s = max(2 * (count - 1) * link.transfer_s(-(-gradients // count)) for link in links)
    held, step_s = format_bytes(held_bytes), format_seconds(alone.step_s)
    return (
        f"one {plan.devices[0]} holds the model with room (about {held} of {format_bytes(room)}, {each} "
        f"row{'s' * (each > 1)} at a time): data parallel (DDP) over the {count} has no bubble and would take about "
        f"{step_s} a step, and up to {format_seconds(ring_s)} more to sum gradients; this plan takes "
        f"{format_seconds(plan.step_s)}"
    )
