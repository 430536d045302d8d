"""The cut of a plan on a model once more: checked, and costed anew.

plan ── moves, or an edit of its file ──► a plan whose figures are still those of before: `Plan.edited`
                                             │ with the model: recosted
                                             ▼
                                          the plan of that cut, or PlanError with the node that cannot be there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx, nn

from autosplit.errors import PlanError
from autosplit.options import Options
from autosplit.partition.graph import base_graph
from autosplit.partition.reduce.coarse import runs
from autosplit.planning.plan.fingerprint import check_plan, fingerprint_of
from autosplit.planning.plan.moves import sealed
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.write import Writer
from autosplit.planning.profiled.apply import assign, sources
from autosplit.planning.profiled.problem import prepare_scheduled
from autosplit.planning.profiled.units import units_of
from autosplit.planning.request.sizes import sizes_of
from autosplit.planning.search.given import given
from autosplit.trace.graph import INFO, NodeClass, TracedGraph
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.trace.ladder import Trace

_UNITS = 320
"""About as many units the model is shown in, as in a search."""


def recosted(model: nn.Module, found: Trace, options: Options, plan: Plan) -> Plan:
    """Return the plan of a plan's own cut and choices, with the figures that ``options`` give it on this recording.

    ``options`` say everything else: devices, limits, optimizer, precision. Raises PlanError where the plan is of
    another model, has another number of lanes than there are devices, or has a node where it cannot run.
    """
    check_plan(plan, model, devices=len(options.devices))
    if options.machine is None:
        options = replace(options, devices=options.devices[: len(plan.devices)])
    elif len(plan.devices) != len(options.devices):
        raise PlanError(
            f"the plan has {len(plan.devices)} lanes, devices names {len(options.devices)}; give one device per lane"
        )
    if plan.rung == "module tree":
        raise PlanError("the plan is of a model that ran by its own Python: it cannot be moved by hand; plan again")
    cut = plan.stage_of()
    _check_nodes(model, found.graph, plan)
    check_order(found.graph, cut, stages=len(plan.stages))
    own = replace(
        options,
        chunks=plan.chunks,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        actions=plan.actions,
    )
    sizes = sizes_of(batch_rows(found.inputs), plan.chunks, found.graph.min_rows, like=options.microbatches)
    case = prepare_scheduled(model, found, own, sizes=sizes)
    recompute = [stage.recompute for stage in plan.stages]
    partition = given(case, cut, recompute, stages=len(plan.stages))
    made = Writer(case, partition).plan()
    unit_of = runs(case.problem, base_graph(case.problem), most=_UNITS)
    units = units_of(case, unit_of, partition.assignment)
    return sealed(made.model_copy(update={"units": units, "proofs": made.proofs or plan.proofs}))


def _check_nodes(model: nn.Module, traced: TracedGraph, plan: Plan) -> None:
    """Raise PlanError where an edit has lost or invented a node; of another recording a plan knows no nodes."""
    names = [info.name for _, info in traced.compute_nodes()]
    if not plan.edited or fingerprint_of(model, names).nodes != plan.fingerprint.nodes:
        return
    cut = plan.stage_of()
    lost = next((name for name in names if name not in cut), None)
    if lost is not None:
        raise PlanError(f"{lost!r} is in no stage of the plan, and the model runs it; put it into one, or plan again")
    known = set(names)
    foreign = next((name for name in cut if name not in known), None)
    if foreign is not None:
        raise PlanError(
            f"{foreign!r} is in stage {cut[foreign]} of the plan, and the model has no such node; take it out, or plan "
            "again"
        )


def check_order(traced: TracedGraph, cut: Mapping[str, int], *, stages: int) -> None:
    """Raise PlanError where a node of a recording cannot run in the stage that a cut gives it.

    Data flows from stage to stage in their order, and what has to be together is. What runs once per step follows its
    users, whatever a cut says.
    """
    placed = assign(traced, cut, stages=stages)
    for node, info in traced.compute_nodes():
        wanted = cut.get(info.name)
        if wanted is None or info.node_class is not NodeClass.MICRO or placed[info.name] == wanted:
            continue
        raise PlanError(
            f"{info.name!r} cannot run in stage {wanted}: {_why(node, wanted, placed)}; move that too, or plan again"
        )


def _why(node: fx.Node, wanted: int, placed: Mapping[str, int]) -> str:
    for source in sources(node):
        name = source.meta[INFO].name
        if source.op != "placeholder" and placed.get(name, 0) > wanted:
            return f"it takes {name!r} of stage {placed[name]}"
    return f"it belongs with others that run in stage {placed[node.meta[INFO].name]}"
