"""A chosen plan with its explanation: why it is as it is, and what would make it fit where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autosplit.checks import resolve_machine
from autosplit.planning.changes import Arguments, changes, tried
from autosplit.planning.choose import Space, choose_plan
from autosplit.planning.extremes import largest_batch, smallest
from autosplit.planning.paper import OnPaper, stand_ins
from autosplit.planning.paper_loss import note_on_no_loss
from autosplit.planning.plan import Plan
from autosplit.planning.reasons import reasons
from autosplit.planning.single import one_is_enough
from autosplit.progress import phase

_PLANNED_NODES = 1000
"""Of models with more nodes changes are estimated; of smaller ones the first are planned."""


def answered(paper: OnPaper, space_of: Callable[[OnPaper], Space], *, find: str) -> Plan:
    """Return the best plan, or the one for the fewest devices or for the largest batch, with its explanation."""
    if find == "best":
        space = space_of(paper)
        found = explained(choose_plan(paper.model, paper.found, paper.options, space), paper, space)
        return found.model_copy(update={"notes": (*found.notes, *_fewer_microbatches(found, paper, space))})
    edge = smallest(paper, space_of) if find == "smallest" else largest_batch(paper, space_of(paper))
    plan = explained(edge.plan, edge.paper, space_of(edge.paper))
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


def explained(plan: Plan, paper: OnPaper, space: Space) -> Plan:
    """Return the plan with its reasons, and with changes where it does not surely fit."""
    options = paper.options

    def replan(arguments: Arguments) -> Plan | None:
        return replanned(plan, paper, space, arguments)

    small = sum(len(stage.nodes) for stage in plan.stages) <= _PLANNED_NODES
    with phase("pricing changes"):
        found = changes(plan, options, space, replan=replan if small else None)
    hopeless = tried(plan, options, space) if plan.verdict == "no" and not found else None
    single = one_is_enough(plan, options.links)
    return plan.model_copy(update={"reasons": (*reasons(plan), *filter(None, (hopeless, single))), "changes": found})


def replanned(plan: Plan, paper: OnPaper, space: Space, arguments: Arguments) -> Plan | None:
    """Plan again with other arguments; None where that takes a new recording.

    ``batch`` are the rows of another batch, in as many microbatches.
    """
    options, rows, own = paper.options, sum(plan.microbatch_rows), space
    for name, value in arguments.items():
        if name == "devices":
            if space.recompute is not None and len(space.recompute) > 1:
                return None
            machine = resolve_machine(value)
            options = replace(options, machine=machine, devices=stand_ins(machine))
        elif name == "optimizer":
            options = replace(options, optimizer=value)
        elif name == "recompute":
            own = replace(own, recompute=(str(value),))
        elif name == "chunks":
            own = replace(own, chunks=(int(value),))
        elif name == "schedule":
            own = replace(own, schedules=((str(value), 1),))
        elif name == "batch":
            rows, own = int(value), replace(own, chunks=(plan.chunks,))
        else:
            return None
    return choose_plan(paper.model, paper.found, options, own, rows=rows)
