"""The search over microbatches, schedules and recompute: for each of them the best cut, of all of these the best plan.

A plan that fits is better than a borderline one, that better than one that does not fit; among those that fit the
fastest is best, among those that do not the one that comes closest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from autosplit.errors import InfeasibleError, InputError, ScheduleError
from autosplit.options import Options
from autosplit.planning.plan import Plan
from autosplit.planning.records import Alternative
from autosplit.planning.search import best_effort, make_plan
from autosplit.planning.sizes import sizes_of
from autosplit.trace.inputs import batch_rows
from autosplit.trace.ladder import Trace

_RANK = {"fits": 0, "borderline": 1, "no": 2}


@dataclass(frozen=True)
class Space:
    """What may be chosen: how many microbatches, which schedule with how many stages per device, what is recomputed.

    ``recompute`` is as in `Options`: one entry for all stages, one per stage, or None for what the memory asks for.
    """

    chunks: tuple[int, ...]
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1),)
    recompute: tuple[str, ...] | None = None


def choose_plan(
    model: nn.Module,
    found: Trace,
    options: Options,
    space: Space,
    *,
    rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Return the best plan of a space, with the others that are worth a look as its ``frontier``.

    ``options`` say everything that the space does not; ``rows`` is the size of the batch, by default the sample's.
    ``progress`` is told how much of how much is done. Where nothing
    fits, the plan that comes closest comes back with verdict "no". Raises InputError where no entry of the space can be
    built for the devices.
    """
    cases = list(_cases(found, options, space, rows=rows or batch_rows(found.inputs)))
    plans = []
    for done, (own, sizes) in enumerate(cases):
        try:
            plans.append(_planned(model, found, own, sizes))
        except ScheduleError:
            continue
        finally:
            if progress is not None:
                progress(done + 1, len(cases))
    if not plans:
        raise InputError(f"none of {len(cases)} combinations of chunks and schedules can be built; give others")
    best = min(plans, key=_order)
    return best.model_copy(update={"frontier": frontier([alternative(plan) for plan in plans])})


def _cases(found: Trace, options: Options, space: Space, *, rows: int) -> Iterator[tuple[Options, tuple[int, ...]]]:
    """Yield the options of each case, and its microbatches; a batch may be too small for what was asked for."""
    seen = set()
    for chunks in space.chunks:
        sizes = sizes_of(rows, chunks, found.graph.min_rows, like=options.microbatches)
        for schedule, virtual_stages in space.schedules:
            case = (sizes, schedule, virtual_stages)
            if case not in seen:
                seen.add(case)
                own = replace(
                    options,
                    chunks=len(sizes) if len(sizes) < chunks else chunks,
                    schedule=schedule,
                    virtual_stages=virtual_stages,
                    recompute=space.recompute,
                )
                yield own, sizes


def _planned(model: nn.Module, found: Trace, options: Options, sizes: tuple[int, ...]) -> Plan:
    try:
        return make_plan(model, found, options, sizes=sizes)
    except InfeasibleError:
        return best_effort(model, found, options, sizes=sizes)


def _order(plan: Plan) -> tuple[float, ...]:
    over = max((s.memory.peak_bytes / (s.memory.capacity_bytes or float("inf")) for s in plan.stages), default=0.0)
    return (_RANK[plan.verdict], plan.step_s) if plan.verdict != "no" else (_RANK["no"], over)


def alternative(plan: Plan) -> Alternative:
    """Return what a plan chose and what it costs."""
    recompute = tuple(stage.recompute for stage in plan.stages)
    return Alternative(
        chunks=plan.chunks,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        recompute=recompute if len(set(recompute)) > 1 else recompute[:1],
        step_s=plan.step_s,
        peak_bytes=max(stage.memory.peak_bytes for stage in plan.stages),
        verdict=plan.verdict,
        replayed=True,
    )


def frontier(weighed: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Return those that none beats in both step and peak, the fastest first."""
    kept: list[Alternative] = []
    for each in sorted(weighed, key=lambda own: (own.step_s, own.peak_bytes)):
        if not kept or each.peak_bytes < kept[-1].peak_bytes:
            kept.append(each)
    return tuple(kept)
