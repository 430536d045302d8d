"""Figures of a step: what it takes beside its operations, and how much it does in tokens and FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from autosplit.options import Options
from autosplit.planning.plan.record import StagePlan
from autosplit.planning.profiled.specs import device_specs
from autosplit.profile.types import Profile
from autosplit.schedule.action import Schedule
from autosplit.schedule.simulate import Timeline
from autosplit.trace.graph import NodeClass, TracedGraph
from cost_models.specs import StepAmounts
from cost_models.work import DType


def overhead_s(options: Options, stages: Sequence[StagePlan], schedule: Schedule, timeline: Timeline) -> float:
    """Return the seconds that a simulated step takes longer than its actions and transfers: the slowest lane's.

    0 where nothing is known of the devices, and on paper, where no lane runs.
    """
    if options.machine is not None or options.lanes != "threads":
        return 0.0
    amounts = step_amounts(stages, schedule, timeline)
    known = [(spec.step, amount) for spec, amount in zip(device_specs(options), amounts, strict=False) if spec.step]
    return max((step.seconds(amount) for step, amount in known), default=0.0)


def step_amounts(stages: Sequence[StagePlan], schedule: Schedule, timeline: Timeline) -> list[StepAmounts]:
    """Return for each lane what `cost_models.specs.StepSpec` has a cost for.

    A lane works beside the others for as long as it works, times the share of the step in which another lane does.
    """
    sums = max(0, schedule.microbatches - 1) if schedule.has_backward else 0
    busy_s, amounts = timeline.busy_s, []
    for lane, actions in enumerate(schedule.lanes):
        memories = [stage.memory for stage in stages if stage.lane == lane]
        others = (len(busy_s) - 1) * timeline.step_s
        share = (sum(busy_s) - busy_s[lane]) / others if others else 0.0
        amounts.append(
            StepAmounts(
                steps=1,
                actions=len(actions),
                gradient_bytes=sums * sum(memory.gradient_bytes for memory in memories),
                held_bytes=sum(memory.activation_bytes for memory in memories),
                overlapped_s=busy_s[lane] * share,
            )
        )
    return amounts


_RATES: dict[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_COMPUTES: dict[str, DType] = {"fp32": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16", "bf16": "bf16"}
_COMPUTES |= {"bf16_fp32_master": "bf16", "fp8": "fp8"}


def parameter_dtype(traced: TracedGraph) -> str | None:
    """Return the dtype of most of the model's parameters, quantised ones left out; None without any."""
    elements: Counter[str] = Counter()
    for parameter in filter(torch.is_floating_point, traced.root.parameters()):
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return max(elements, key=lambda name: elements[name]) if elements else None


def model_flops(traced: TracedGraph, costs: Profile, sizes: Sequence[int], *, backward: bool) -> float:
    """Return the FLOPs of a step's forwards and backwards, each counted once, without recomputation."""
    total = 0.0
    for _, info in traced.compute_nodes():
        node, micro = costs.nodes[info.name], info.node_class is NodeClass.MICRO
        flops = node.forward_flops + backward * node.backward_flops
        total += flops * (sum(sizes) / sizes[0] if micro else 1)
    return total


def peak_flops_per_s(options: Options, dtype: str | None) -> float | None:
    """Return the peak rate of all devices in the step's arithmetic; None if a device's data sheet does not have it."""
    kind = _COMPUTES.get(options.precision or "") or _RATES.get(dtype or "")
    if kind is None or options.kernels == "cpu":
        return None
    try:
        return sum(spec.peak(kind) for spec in device_specs(options))
    except ValueError:
        return None
