"""One configuration of a model on its devices: profiled, and formulated as the problem that is to be cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from autosplit.options import Options
from autosplit.partition.graph import base_graph
from autosplit.partition.problem import Problem
from autosplit.planning.formulate import Formulation, formulate, scheduled
from autosplit.planning.paper_loss import PaperLoss, with_loss
from autosplit.planning.schedules import settle
from autosplit.profile.autocasting import autocast_of
from autosplit.profile.blocks import CostMemo
from autosplit.profile.combine import profile
from autosplit.profile.trace_memo import TraceMemo
from autosplit.profile.types import Profile
from autosplit.trace.ladder import Trace
from autosplit.trace.probe import probe_rows
from autosplit.trace.state import attributes, buffer_contents
from cost_models.specs import DeviceSpec


@dataclass(frozen=True)
class Case:
    """A model that was profiled for its microbatches, as the problem of one schedule."""

    model: nn.Module
    found: Trace
    options: Options
    sizes: tuple[int, ...]
    costs: Profile
    formulation: Formulation
    warning: str | None = None
    memo: TraceMemo = field(default_factory=TraceMemo)
    """What was traced for cuts of the recording; cases of one recording may share it."""

    @property
    def problem(self) -> Problem:
        """What is to be cut."""
        return self.formulation.problem


def prepare(model: nn.Module, found: Trace, options: Options, *, sizes: tuple[int, ...]) -> Case:
    """Profile a recording for microbatches of the given sizes and formulate its problem."""
    memo = CostMemo()
    costs = profiled(model, found, options, sizes, memo=memo)
    formulation = formulate(found.graph, costs, options, microbatches=len(sizes))
    formulation = slowed(formulation, slowdowns(model, found, options, sizes, costs, memo=memo))
    settled = settle(options, parts=base_graph(formulation.problem).size, microbatches=len(sizes))
    formulation = replace(formulation, problem=scheduled(formulation.problem, settled))
    return Case(model, found, options, sizes, costs, formulation, settled.warning)


def slowdowns(
    model: nn.Module, found: Trace, options: Options, sizes: tuple[int, ...], costs: Profile, *, memo: CostMemo
) -> tuple[float, ...] | None:
    """Return how many times as long all nodes together take on each device as on the first; None: all are alike.

    ``costs`` are those of the first device on paper; ``memo`` is what they were made with.
    """
    if options.machine is None or len({device.name for device in options.machine.devices}) < 2:
        return None
    first_s, known = _seconds(costs), {options.machine.devices[0].name: 1.0}
    for device in options.machine.devices:
        if device.name not in known:
            there_s = _seconds(profiled(model, found, options, sizes, device=device, memo=memo))
            known[device.name] = there_s / first_s if first_s and there_s else 1.0
    return tuple(known[device.name] for device in options.machine.devices)


def slowed(formulation: Formulation, factors: tuple[float, ...] | None) -> Formulation:
    """Return the formulation with devices that take so many times as long."""
    problem = formulation.problem
    if factors is None or problem.devices is None:
        return formulation
    devices = tuple(replace(device, slowdown=factor) for device, factor in zip(problem.devices, factors, strict=True))
    return replace(formulation, problem=replace(problem, devices=devices))


def _seconds(costs: Profile) -> float:
    return sum(node.forward_s + node.backward_s for node in costs.nodes.values())


def profiled(
    model: nn.Module,
    found: Trace,
    options: Options,
    sizes: tuple[int, ...],
    *,
    device: DeviceSpec | str | None = None,
    memo: CostMemo | None = None,
) -> Profile:
    """Return what the nodes of a recording cost for microbatches of the first size; the model stays as it is.

    ``device`` is by default the options' first; ``memo`` is for further sizes and devices.
    """
    device = options.model_device if device is None else device
    leaves = []
    for position in found.inputs.tensors():
        leaf, dim = found.inputs.leaves[position], found.inputs.batch_dims[position]
        leaves.append(leaf if dim is None or leaf.is_meta else probe_rows(leaf, dim, range(sizes[0])))
    autocast = autocast_of(options.precision, kernels=options.kernels)
    with attributes(model), buffer_contents(model), autocast:
        costs = profile(
            found.graph,
            rows=sizes[0],
            batch_rows=sum(sizes),
            inputs=leaves,
            measure=options.measure,
            device=device,
            kernels=options.kernels,
            memo=memo,
        )
        if not isinstance(options.loss, PaperLoss):
            return costs
        return with_loss(costs, options.loss, batch_rows=sum(sizes), device=device, kernels=options.kernels)
