"""A recorded model: profiled for its devices, and formulated as the problem that is to be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.options import Options
from autosplit.parallel import Parallel
from autosplit.partition.graph import base_graph
from autosplit.partition.problem import Problem
from autosplit.planning.paper_loss import PaperLoss, with_loss
from autosplit.planning.parallel.placements import shares_of
from autosplit.planning.parallel.rank import rank_profile, with_gathers
from autosplit.planning.parallel.tokens import shares_of_experts, shares_of_keys, with_all_keys
from autosplit.planning.profiled.apply import DataflowIndex
from autosplit.planning.profiled.formulate import Outline, formulate, scheduled
from autosplit.planning.profiled.offload import with_copies
from autosplit.planning.profiled.specs import device_specs, driver_name
from autosplit.planning.request import ResolvedSchedule, settle
from autosplit.profile.autocasting import autocast_of
from autosplit.profile.blocks import CostMemo
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.node_costs.work import cost_model_of
from autosplit.profile.shares import TensorShares
from autosplit.profile.stage_trace.trace_memo import TraceMemo
from autosplit.profile.types import Profile
from autosplit.tensor.local import draws_in_parts
from autosplit.tensor.plan import check_sharded, tensor_plan
from autosplit.trace.borrowed.state import borrowed
from autosplit.trace.inputs.inputs import batch_rows, tokens_per_row
from autosplit.trace.ladder import Trace
from autosplit.trace.rows.probe import probe_inputs
from cost_models.collectives import Group
from cost_models.specs import DeviceSpec


@dataclass(frozen=True)
class ProfiledProblem:
    """A model that was profiled for its microbatches, as the problem that is to be cut."""

    recorded: RecordedModel
    options: Options
    sizes: tuple[int, ...]
    costs: Profile
    """Of one rank of the mesh, where one is planned for."""
    whole: Profile
    """Of the whole model."""
    problem: Problem
    warning: str | None = None

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The stable names that each work of the problem stands for."""
        return self.recorded.outline.names

    @property
    def index(self) -> DataflowIndex:
        """What feeds the nodes of the recording."""
        return self.recorded.outline.index

    def under(self, options: Options, schedule: ResolvedSchedule) -> ProfiledProblem:
        """Return the problem under another schedule than 1F1B, and what else was asked for with it."""
        return replace(self, options=options, problem=scheduled(self.problem, schedule), warning=schedule.warning)


class RecordedModel:
    """A recorded model, and results that searches share, for any batch and any devices.

    Attributes:
        context: how many ranks share the tokens of a row (cp), of which one's are recorded.
        memo: the traces of its stages.
        outline: its works.
    """

    def __init__(self, model: nn.Module, trace: Trace, *, context: int = 1) -> None:
        self.model, self.trace, self.context = model, trace, context
        self.memo = TraceMemo(trace.graph)
        self.outline = Outline(trace.graph)
        self._costs = CostMemo(trace.graph)
        self._profiles: dict[Hashable, Profile] = {}
        self._shares: dict[tuple[int, bool], TensorShares] = {}
        self._parts: dict[Hashable, tuple[Profile, Mapping[str, Group], Profile]] = {}

    @property
    def rows(self) -> int:
        """The rows of the batch that was recorded."""
        return batch_rows(self.trace.inputs)

    @property
    def tokens(self) -> int | None:
        """The tokens of a whole row; None where no input is a table of integers."""
        count = tokens_per_row(self.trace.inputs)
        return None if count is None else count * self.context

    # -- problems ------------------------------------------------------------------------------------------------
    def problem(self, options: Options, sizes: tuple[int, ...]) -> ProfiledProblem:
        """Profile for microbatches of the given sizes and formulate the problem under 1F1B."""
        whole = self.profile(options, sizes)
        costs = self.of_rank(whole, options)
        factors = self._slowdowns(options, sizes, costs)
        problem = formulate(self.outline, costs, options, microbatches=len(sizes), slowdowns=factors)
        return ProfiledProblem(self, options, sizes, costs, whole, problem)

    def scheduled_problem(self, options: Options, sizes: tuple[int, ...]) -> ProfiledProblem:
        """Return the problem under the schedule that the options ask for, as far as the model has parts for it."""
        case = self.problem(options, sizes)
        return case.under(options, settle(options, parts=base_graph(case.problem).size, microbatches=len(sizes)))

    # -- costs ---------------------------------------------------------------------------------------------------
    def profile(self, options: Options, sizes: tuple[int, ...], *, device: DeviceSpec | None = None) -> Profile:
        """Return what the nodes cost for microbatches of the first size; the model stays as it is.

        ``device`` is by default the options' leading one. Times are measured only where the model lies on a device of
        that kind.
        """
        lead = options.devices[options.leading]
        on_lane = device is None and options.machine is None and lead.type == "cpu"
        spec = "cpu-lane" if on_lane else (device or device_specs(options)[options.leading])
        name = (spec if isinstance(spec, str) else spec.name, str(lead) if options.measure else "")
        key = sizes[0], sum(sizes) if self._costs.mixes else None, name, options.kernels, id(options.loss)
        if key not in self._profiles:
            self._profiles[key] = self._profiled(options, sizes, spec)
        return self._profiles[key]

    def _profiled(self, options: Options, sizes: tuple[int, ...], device: DeviceSpec | str) -> Profile:
        leaves = probe_inputs(self.trace.inputs, sizes[0])
        measure = options.measure and _lies_on(options.devices[options.leading], self.model, leaves)
        state = borrowed(self.model) if measure else contextlib.nullcontext()  # else nothing of the model's own runs
        with state, autocast_of(options.precision, kernels=options.kernels):
            costs = profile(
                self.trace.graph,
                rows=sizes[0],
                batch_rows=sum(sizes),
                inputs=leaves,
                measure=measure,
                device=device,
                kernels=options.kernels,
                memo=self._costs,
            )
            if self.context > 1:
                costs = with_all_keys(costs, self.context)
            if not isinstance(options.loss, PaperLoss):
                return costs
            return with_loss(costs, options.loss, batch_rows=sum(sizes), device=device, kernels=options.kernels)

    def _slowdowns(self, options: Options, sizes: tuple[int, ...], costs: Profile) -> tuple[float, ...]:
        """Return how many times as long all nodes together take on each device as on the leading one.

        ``costs`` are those of the leading device. Devices are told apart by their cost models, also where the leading
        one was measured.
        """
        specs = device_specs(options)
        if len({spec.name for spec in specs}) < 2:
            return (1.0,) * len(specs)

        def seconds(spec: DeviceSpec) -> float:
            return _seconds(self.profile(replace(options, measure=False), sizes, device=spec))

        lead = specs[options.leading]
        first_s, known = seconds(lead) if costs.measured else _seconds(costs), {lead.name: 1.0}
        for spec in specs:
            if spec.name not in known:
                there_s = seconds(spec)
                known[spec.name] = there_s / first_s if first_s and there_s else 1.0
        return tuple(known[spec.name] for spec in specs)

    # -- ranks ---------------------------------------------------------------------------------------------------
    def of_rank(self, costs: Profile, options: Options) -> Profile:
        """Return one rank's part of a profile in the mesh that is planned for, without one all, with waits for copies.

        Raises InputError for a model without blocks whose activations are to lie on the host.
        """
        blocks, served = self.outline.blocks, self.outline.served
        if options.placed is not None:
            costs = with_gathers(self._part(costs, options), placed=options.placed, blocks=blocks, served=served)
        if "activations" in options.offload:
            if not blocks:
                raise InputError("offload='activations' copies what repeated blocks save, and the model has none")
            costs = with_copies(costs, blocks, device_specs(options)[options.leading].host_link)
        return costs

    def shares(self, parallel: Parallel, *, rng: str) -> TensorShares:
        """Return what a tensor-parallel rank has of every node: by the plan for the whole batch.

        Raises InputError where ranks cannot share what pairs of products have, or nothing.
        """
        traced = self.trace.graph
        key = parallel.tp, parallel.sequence
        if parallel.tp == 1:
            return TensorShares()
        if key not in self._shares:
            draws = draws_in_parts(traced, plain=rng == "plain")
            if parallel.sequence:
                draws = {info.name for _, info in traced.compute_nodes() if info.random}
            plan = tensor_plan(traced, ranks=parallel.tp, rows=self.rows, draws=draws)
            check_sharded(plan)
            self._shares[key] = shares_of(plan, traced, sequence=parallel.sequence)
        return self._shares[key]

    def _part(self, costs: Profile, options: Options) -> Profile:
        """Return a rank's part of a profile, not yet divided over data-parallel ranks.

        Profiles at equal rows are one object (`profile`), so a part is made once for all meshes that have it.
        """
        assert options.placed is not None
        parallel, groups = options.parallel, options.placed.groups
        fp8 = options.precision == "fp8"
        key = costs.rows, parallel.tp, parallel.sequence, parallel.ep, fp8
        last = self._parts.get(key)
        if last is None or last[0] is not costs or last[1] != groups:
            shares = self.shares(parallel, rng=options.rng)
            if self.context > 1:
                shares = shares_of_keys(shares, costs, self.trace.graph, self.context)
            if parallel.ep > 1:
                shares = shares_of_experts(shares, costs, self.trace.graph, parallel.ep)
            model = cost_model_of(device_specs(options)[options.leading])
            of_rank = rank_profile(
                costs,
                shares,
                groups=groups,
                blocks=self.outline.blocks,
                model=model,
                fp8=fp8,
                like=None if last is None or last[1] != groups else (last[0], last[2]),
            )
            self._parts[key] = costs, groups, of_rank
        return self._parts[key][2]


def _seconds(costs: Profile) -> float:
    return sum(node.forward_s + node.backward_s for node in costs.nodes.values())


def _lies_on(lead: torch.device, model: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether a model, or one without state its inputs, lies on devices of the same kind as ``lead``."""
    tensors = (*model.parameters(), *model.buffers()) or tuple(inputs)
    places = {tensor.device for tensor in tensors}
    places = {device for device in places if device.type != "cpu"} or places
    alike = [device for device in places if device.type == lead.type]
    return bool(alike) and (places == {lead} or {driver_name(device) for device in alike} == {driver_name(lead)})
