"""A chosen plan with its explanation: why it is as it is, and what would make it fit where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autosplit.planning.explain.changes import Request, changes, tried
from autosplit.planning.explain.extremes import largest_batch, smallest
from autosplit.planning.explain.reasons import reasons
from autosplit.planning.explain.verdicts import device_verdicts
from autosplit.planning.plan.plan import Plan
from autosplit.planning.request.paper import OnPaper
from autosplit.planning.request.paper_loss import note_on_no_loss
from autosplit.planning.search.sweep import Space
from autosplit.progress import phase
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.units import format_bytes, format_seconds

_ROOM = 0.8
"""A device holds a model with room that fills at most this share of what it surely has."""


def answered(paper: OnPaper, space_of: Callable[[OnPaper], Space], *, find: str) -> Plan:
    """Return the best plan, or the one for the fewest devices or for the largest batch, with its explanation."""
    if find == "best":
        request = Request(paper, space_of(paper), batch_rows(paper.found.inputs))
        found = explained(request.plan(), request)
        return found.model_copy(update={"notes": (*found.notes, *_fewer_microbatches(found, paper, request.space))})
    edge = smallest(paper, space_of) if find == "smallest" else largest_batch(paper, space_of(paper))
    request = Request(edge.paper, space_of(edge.paper), sum(edge.plan.microbatch_rows))
    plan = explained(edge.plan, request)
    return plan.model_copy(update={"reasons": (edge.words, *plan.reasons)})


def assumed(plan: Plan, paper: OnPaper) -> Plan:
    """Return the plan with notes on what nobody said: what stands for the loss, and whose values decided."""
    found = []
    if paper.options.loss is None and plan.schedule != "forward":
        found.append(note_on_no_loss(paper.found.graph))
    if paper.by_values:
        found.append(
            "the forward decides by values, so the model and inputs were taken with theirs: other values may take "
            "another way through it"
        )
    elif answers := paper.found.gathered.scope.answers:
        found.append(
            f"the forward reads values {'once' if len(answers) == 1 else f'{len(answers)} times'} (first: "
            f"{answers[0].name}); where sizes do not decide them, it is planned for finite values and for masks that "
            "hide something"
        )
    return plan.model_copy(update={"notes": (*plan.notes, *(note for note in found if note is not None))})


def _fewer_microbatches(plan: Plan, paper: OnPaper, space: Space) -> Iterator[str]:
    """Yield a note where the batch has too few rows for the microbatches that were asked for."""
    used, rows, least = len(plan.microbatch_rows), sum(plan.microbatch_rows), paper.found.graph.min_rows
    if len(space.chunks) == 1 and used < space.chunks[0]:
        of = f" of at least {least}" if least > 1 else ""
        yield (
            f"chunks={space.chunks[0]} was asked for, and the batch's {rows} rows make {used} microbatches{of}; "
            f"{space.chunks[0]} take {least * space.chunks[0]} rows or more"
        )


def explained(plan: Plan, request: Request) -> Plan:
    """Return the plan with its reasons, and with changes where it does not surely fit."""
    with phase("pricing changes"):
        found = changes(plan, request)
        hopeless = tried(plan, request) if plan.verdict == "no" and not found else None
    others = filter(None, (hopeless, one_is_enough(plan, request)))
    return plan.model_copy(update={"reasons": (*reasons(plan), *others), "changes": found})


def one_is_enough(plan: Plan, request: Request) -> str | None:
    """Return that one device of the plan's would hold the model with room, and what data parallel over all would take.

    None where it would not, where devices differ, and for an evaluation. Every replica takes its share of the
    microbatches; gradients are summed once, in a ring over the slowest link.
    """
    count, rows, links = len(plan.devices), request.rows, request.paper.options.links
    devices = device_verdicts(plan)
    room, states = devices[0].room_bytes, sum(device.states_bytes for device in devices)
    alike = len(set(plan.devices)) == 1 and plan.schedule != "forward"
    if count < 2 or rows < count or room is None or not alike or not links or states > _ROOM * room:
        return None
    share = -(-rows // count)
    each = min(max(plan.microbatch_rows), share)
    space = Space((-(-share // each),), recompute=("never",))
    own = replace(request, space=space, rows=share).changed({"devices": f"1x{plan.devices[0]}"}, chunks=plan.chunks)
    alone = own.search().fastest()
    if alone is None or (held_bytes := max(alone.cut.device_bytes)) > _ROOM * room:
        return None
    gradients = sum(stage.memory.parameter_bytes for stage in plan.stages)
    ring_s = max(2 * (count - 1) * link.transfer_s(-(-gradients // count)) for link in links)
    held, step_s = format_bytes(held_bytes), format_seconds(alone.step_s)
    return (
        f"one {plan.devices[0]} holds the model with room (about {held} of {format_bytes(room)}, {each} "
        f"row{'s' * (each > 1)} at a time): data parallel (DDP) over the {count} has no bubble and would take about "
        f"{step_s} a step, and up to {format_seconds(ring_s)} more to sum gradients; this plan takes "
        f"{format_seconds(plan.step_s)}"
    )
