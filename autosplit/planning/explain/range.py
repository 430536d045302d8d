"""Between what times a plan's step may come out, and what that hangs on: the plan's cut, costed for slower machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import hypot
from typing import Any

from autosplit.parallel import place
from autosplit.planning.paper import OnPaper, stand_ins
from autosplit.planning.plan.fields import Sensitivity
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.write import Writer
from autosplit.planning.search.make import as_given, with_choices
from cost_models.kernels import architecture
from cost_models.machines import MachineSpec
from cost_models.specs import DeviceSpec

_SLOWER, _FASTER = 0.15, 0.1
"""How much longer and shorter kernels may take than predicted: of every seventh of 216 published runs nine in ten are
between, with no constant fitted (``benchmarks/throughput.py``). Twice as much on an architecture without a file."""
_NETWORK = 0.5, 0.25
"""The parts of what half the network costs by which a step may be longer and shorter; priors."""


def range_of(plan: Plan, paper: OnPaper) -> dict[str, Any]:
    """Return the fields of a plan on paper that say its range; none where it is of other devices, or has no step."""
    machine, length = paper.options.machine, paper.recorded.tokens
    if machine is None or (plan.machine, plan.rung, plan.sequence) != (machine.name, "recorded", length):
        return {}
    found = [Sensitivity(what=what, ratio=_step_s(plan, paper, slow) / plan.step_s) for what, slow in _slower(machine)]
    kernels, network = (found[0].ratio - 1, sum(each.ratio - 1 for each in found[1:]))
    unknown = 1 if all(architecture(each.compute_capability).arithmetic for each in machine.devices) else 2
    longer = hypot(unknown * kernels, _NETWORK[0] * network)
    shorter = hypot(unknown * kernels * _FASTER / _SLOWER, _NETWORK[1] * network)
    low_s, high_s = plan.step_s * max(0.0, 1 - shorter), plan.step_s * (1 + longer)
    return {"step_low_s": low_s, "step_high_s": high_s, "sensitivity": tuple(found)}


def _slower(machine: MachineSpec) -> Iterator[tuple[str, MachineSpec]]:
    """Yield machines with something slower, and what, in words."""
    slow = {spec.name: _slow(spec) for spec in machine.devices}
    devices = tuple(slow[spec.name] for spec in machine.devices)
    yield f"kernels {_SLOWER:.0%} slower", machine.model_copy(update={"devices": devices})
    if machine.network is not None:
        half = machine.network.bandwidth_bytes_per_s / 2
        link = machine.network.model_copy(update={"bandwidth_bytes_per_s": half})
        yield "half the network", machine.model_copy(update={"network": link})


def _slow(spec: DeviceSpec) -> DeviceSpec:
    part = 1 / (1 + _SLOWER)
    rates = {
        name: {dtype: part * rate for dtype, rate in getattr(spec, name).items()}
        for name in ("peak_flops_per_s", "emulated_flops_per_s")
    }
    bandwidth = part * spec.memory_bandwidth_bytes_per_s
    return spec.model_copy(update={**rates, "memory_bandwidth_bytes_per_s": bandwidth, "name": f"{spec.name}, slower"})


def _step_s(plan: Plan, paper: OnPaper, machine: MachineSpec) -> float:
    """Return the step of a plan's own cut and choices on another machine."""
    options = replace(paper.options, devices=stand_ins(machine), machine=machine)
    if plan.mesh is not None:
        placed = place(machine, plan.mesh.parallel)
        options = replace(options, devices=stand_ins(placed.pipeline), machine=placed.pipeline, placed=placed)
    case = paper.recorded.scheduled_problem(with_choices(options, plan), plan.microbatch_rows)
    recompute = tuple(stage.recompute for stage in plan.stages)
    return Writer(case, as_given(case, plan.stage_of(), recompute, stages=len(plan.stages))).step_s
