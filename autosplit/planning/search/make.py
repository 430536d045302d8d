"""The plan that `autosplit` runs, and cuts made by hand: checked, and costed anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx, nn

from autosplit.errors import PlanError
from autosplit.options import Options
from autosplit.partition.graph import base_graph
from autosplit.partition.infeasible import over_capacity
from autosplit.partition.line.coarse import runs
from autosplit.partition.solve import Partition
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.write import Writer, check_plan, fingerprint_of
from autosplit.planning.profiled.apply import DataflowIndex, assign
from autosplit.planning.profiled.problem import ProfiledProblem, RecordedModel
from autosplit.planning.profiled.specs import taken_bytes
from autosplit.planning.profiled.units import units_of
from autosplit.planning.request import sizes_of
from autosplit.planning.search.choose import PlanChoice
from autosplit.planning.search.finish import as_cut, bounded
from autosplit.planning.search.lineup import lined_up
from autosplit.planning.search.sweep import Space, Sweep
from autosplit.trace.graph import INFO, NodeClass, TracedGraph
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.trace.ladder import Trace

_SCHEDULES = (("1f1b", 1), ("zb_h1", 1))
"""What `autosplit` weighs under schedule="auto", with how many stages per device."""


def make_plan(model: nn.Module, trace: Trace, options: Options, *, sizes: tuple[int, ...]) -> Plan:
    """Return the plan with the shortest simulated step for microbatches of the given sizes.

    A cut of the caller's runs under 1F1B where schedule="auto". Raises InfeasibleError when the memory limit cannot
    hold; warns when there are fewer separable nodes than devices.
    """
    if options.cut is not None:
        case = RecordedModel(model, trace).scheduled_problem(options, sizes)
        recompute = options.recompute or ("block" if trace.graph.checkpoints else "never",)
        stages = len(options.devices)
        return Writer(case, as_given(case, options.cut, recompute, stages=stages)).plan()
    schedules: tuple[tuple[str, int], ...] = ((options.schedule, options.virtual_stages),)
    if options.schedule == "auto":
        schedules = _SCHEDULES if len(options.devices) > 1 else _SCHEDULES[:1]
    space = Space((options.chunks,), schedules, options.recompute)
    options = replace(options, taken_bytes=taken_bytes(options))
    choice = PlanChoice(lined_up(Sweep(RecordedModel(model, trace), options, space, rows=sum(sizes))))
    writer = choice.finished.writer
    options = writer.options
    limits = [options.capacity_bytes(lane) for lane in range(len(options.devices))]
    if any(limit is not None and peak > limit for peak, limit in zip(writer.peaks, limits, strict=False)):
        known = writer.problem.devices or ()
        whole = tuple(replace(device, capacity_bytes=limit) for device, limit in zip(known, limits, strict=True))
        raise over_capacity(
            replace(writer.problem, devices=whole), writer.partition.assignment, stage_bytes=writer.peaks
        )
    return choice.plan


def as_given(case: ProfiledProblem, cut: Mapping[str, int], recompute: tuple[str, ...], *, stages: int) -> Partition:
    """Return the partition that gives every operation the stage of the innermost module of ``cut`` that it lies in.

    Stages may be empty; empty ones at the end are left out. Capacities play no part: the cut is the caller's.
    ``recompute`` has one entry, or one per stage.
    """
    placed = assign(case.index, cut, stages=stages)
    assignment = tuple(placed[names[0]] for names in case.names)
    used = max(assignment) + 1
    each = recompute * used if len(recompute) == 1 else recompute[:used]
    return bounded(case.problem, as_cut(case.problem, assignment, each))


_UNITS = 320
"""About as many units the model is shown in, as in a search."""


def with_choices(options: Options, plan: Plan) -> Options:
    """Return the options with a plan's own chunks, schedule and replicas."""
    return replace(
        options,
        chunks=plan.chunks,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        actions=plan.schedule_rows,
        replicas=plan.replicas,
    )


def recosted(recorded: RecordedModel, options: Options, plan: Plan) -> Plan:
    """Return the plan of a plan's own cut and choices, with the figures that ``options`` give it on a recording.

    ``options`` say everything else: devices, limits, optimizer, precision. Raises PlanError where the plan is of
    another model, has another number of lanes than there are devices, or has a node where it cannot run.
    """
    model, trace = recorded.model, recorded.trace
    check_plan(plan, model, devices=len(options.devices))
    if options.machine is None:
        options = options.taking(range(min(len(plan.devices), len(options.devices))))
    elif len(plan.devices) != len(options.devices):
        raise PlanError(
            f"the plan has {len(plan.devices)} lanes, devices names {len(options.devices)}; give one device per lane"
        )
    if plan.rung == "module tree":
        raise PlanError("the plan is of a model that ran by its own Python: it cannot be moved by hand; plan again")
    cut = plan.stage_of()
    _check_nodes(model, trace.graph, plan)
    check_order(trace.graph, cut, stages=len(plan.stages))
    chosen = with_choices(options, plan)
    rows, dp = batch_rows(trace.inputs), options.parallel.dp
    if rows % dp:
        raise PlanError(f"the plan has {dp} replicas, which do not divide the batch of {rows} rows; give another batch")
    sizes = sizes_of(rows // dp, plan.chunks, trace.graph.min_rows, like=options.microbatches)
    case = recorded.scheduled_problem(chosen, sizes)
    recompute = tuple(stage.recompute for stage in plan.stages)
    partition = as_given(case, cut, recompute, stages=len(plan.stages))
    costed = Writer(case, partition).plan()
    unit_of = runs(case.problem, base_graph(case.problem), most=_UNITS)
    units = units_of(case, unit_of, partition.assignment)
    return costed.model_copy(update={"units": units, "proofs": costed.proofs or plan.proofs}).sealed()


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
    index = DataflowIndex(traced)
    placed = assign(index, cut, stages=stages)
    for node, info in traced.compute_nodes():
        wanted = cut.get(info.name)
        if wanted is None or info.node_class is not NodeClass.MICRO or placed[info.name] == wanted:
            continue
        why = _why(index.sources[node], placed[info.name], wanted, placed)
        raise PlanError(f"{info.name!r} cannot run in stage {wanted}: {why}; move that too, or plan again")


def _why(feeding: Sequence[fx.Node], stage: int, wanted: int, placed: Mapping[str, int]) -> str:
    for source in feeding:
        name = source.meta[INFO].name
        if source.op != "placeholder" and placed.get(name, 0) > wanted:
            return f"it takes {name!r} of stage {placed[name]}"
    return f"it belongs with others that run in stage {stage}"
