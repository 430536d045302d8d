"""The plan that `autosplit` runs: what `plan()` would choose for the same devices, chunks and schedule, if it fits."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from autosplit.options import Options
from autosplit.partition.infeasible import over_capacity
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.write import Writer
from autosplit.planning.profiled.problem import prepare_scheduled
from autosplit.planning.search.choose import Choice
from autosplit.planning.search.given import given
from autosplit.planning.search.sweep import Space, Sweep
from autosplit.trace.ladder import Trace


def make_plan(model: nn.Module, found: Trace, options: Options, *, sizes: tuple[int, ...]) -> Plan:
    """Return the plan with the shortest simulated step for microbatches of the given sizes.

    Raises InfeasibleError when the memory limit cannot hold; warns when there are fewer separable nodes than devices.
    """
    if options.cut is not None:
        case = prepare_scheduled(model, found, options, sizes=sizes)
        recompute = options.recompute or ("never",)
        stages = len(options.devices)
        return Writer(case, given(case, options.cut, recompute, stages=stages)).plan()
    schedule = "1f1b" if options.schedule == "auto" else options.schedule
    space = Space((options.chunks,), ((schedule, options.virtual_stages),), options.recompute)
    choice = Choice(Sweep(model, found, replace(options, schedule=schedule), space, rows=sum(sizes)))
    finished = choice.finished
    if any(peak > limit for peak, limit in zip(finished.peaks, finished.capacities, strict=False)):
        problem = finished.writer.case.problem
        whole = tuple(
            replace(own, capacity_bytes=options.capacity_bytes(lane)) for lane, own in enumerate(problem.devices or ())
        )
        assignment = finished.writer.partition.assignment
        raise over_capacity(replace(problem, devices=whole), assignment, stage_bytes=finished.peaks)
    return choice.plan
