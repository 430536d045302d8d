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
from autosplit.profile.combine import profile
from autosplit.profile.trace_memo import TraceMemo
from autosplit.profile.types import Profile
from autosplit.trace.ladder import Trace
from autosplit.trace.probe import probe_rows
from autosplit.trace.state import attributes, buffer_contents


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
    costs = profiled(model, found, options, sizes)
    formulation = formulate(found.graph, costs, options, microbatches=len(sizes))
    settled = settle(options, parts=base_graph(formulation.problem).size, microbatches=len(sizes))
    formulation = replace(formulation, problem=scheduled(formulation.problem, settled))
    return Case(model, found, options, sizes, costs, formulation, settled.warning)


def profiled(model: nn.Module, found: Trace, options: Options, sizes: tuple[int, ...]) -> Profile:
    """Return what the nodes of a recording cost for microbatches of the first size; the model stays as it is."""
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
            device=options.model_device,
            kernels=options.kernels,
        )
        if not isinstance(options.loss, PaperLoss):
            return costs
        return with_loss(
            costs, options.loss, batch_rows=sum(sizes), device=options.model_device, kernels=options.kernels
        )
