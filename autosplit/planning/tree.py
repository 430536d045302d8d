"""The plan of a model that runs by its own Python: its units, in the order of their calls, cut into stages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from torch import nn

from autosplit.errors import InputError
from autosplit.options import Options, Sample
from autosplit.partition.checker import check
from autosplit.partition.infeasible import over_capacity
from autosplit.partition.line.line import Line
from autosplit.partition.problem import Hold, Problem, TensorEdge, Work, devices_of
from autosplit.partition.replication import Floats, between, replicate, stages_only
from autosplit.partition.solve import Partition
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Boundary, StagePlan
from autosplit.planning.plan.stage_memory import StageMemory
from autosplit.planning.plan.write import bytes_of_states, covered_modules, fingerprint_of, fit_of
from autosplit.planning.profiled.formulate import state_bytes
from autosplit.planning.profiled.specs import link_seconds
from autosplit.profile.node_costs.module_costs import BACKWARD, module_costs, saved_below
from autosplit.profile.types import StateProfile
from autosplit.trace.inputs.inputs import batch_rows, flatten
from autosplit.trace.module_tree import ModuleCost, choose_units, coarsened, homes, stages_of_modules
from autosplit.units import plural

RUNG: Literal["module tree"] = "module tree"
_SCHEDULE = "gpipe"
"""All forwards, then the backward that the caller asks for."""


def plan_tree(model: nn.Module, sample: Sample, options: Options, *, reason: str) -> Plan:
    """Return the plan with the least bottleneck for a model that no graph can follow, for ``reason``.

    The model runs on the sample; its state, gradients and all random states are as before at the end. Raises what its
    forward raises, and InfeasibleError when the memory limit cannot hold.
    """
    costs = module_costs(model, sample)
    units = tuple(options.cut or choose_units(model, costs, least=len(options.devices)))
    return _TreeWriter(model, options, costs, units, _rows(model, sample, options), reason).plan()


def _rows(model: nn.Module, sample: Sample, options: Options) -> int:
    """Return the rows of the batch; of a list its length, and 1 where nobody could tell."""
    lists = [len(value) for value in (*sample.args, *sample.kwargs.values()) if isinstance(value, list) and value]
    try:
        return lists[0] if lists else batch_rows(flatten(model, sample, options.batch_dims))
    except InputError:
        return 1


class _TreeWriter:
    """Cuts the units and writes the answer down as a plan."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        costs: Mapping[str, ModuleCost],
        units: Sequence[str],
        rows: int,
        reason: str,
    ) -> None:
        self.model, self.options, self.costs, self.units = model, options, costs, units
        self.rows, self.reason = rows, reason
        self.states = _states(model, homes(model, {unit: index for index, unit in enumerate(units)}))
        self.problem = self._problem()
        self.partition: Partition = self._partition()
        called = {path for path, seen in costs.items() if seen.first is not None}
        self.stage_of = coarsened(dict(zip(units, self.partition.assignment, strict=True)), called=called)
        self.home = homes(model, self.stage_of)

    def _partition(self) -> Partition:
        free = [math.inf] * min(len(self.options.devices), len(self.units))
        if self.options.cut is not None:
            costs = check(self.problem, assignment := tuple(self.options.cut[unit] for unit in self.units))
            lower_s = min(check(self.problem, self._cut(free)).bottleneck_s, costs.bottleneck_s)
            return Partition(assignment, "bottleneck", costs.bottleneck_s, lower_s, "bounded", costs)
        limits = self.problem.capacity_bytes or free
        assignment = self._cut([math.inf if limit is None else limit for limit in limits[: len(free)]])
        if not assignment:
            assignment = self._cut(free, by_bytes=True)
            raise over_capacity(self.problem, assignment, stage_bytes=check(self.problem, assignment).stage_bytes)
        costs = check(self.problem, assignment)
        return Partition(assignment, "bottleneck", costs.bottleneck_s, costs.bottleneck_s, "optimal", costs)

    def _cut(self, limits: Sequence[float], *, by_bytes: bool = False) -> tuple[int, ...]:
        """Return the stage of each unit where the largest is smallest, in seconds or bytes; nothing if none fits."""
        line, count = Line(self.problem), len(limits)
        held = line.table("never").fixed + line.table("never").each  # of one microbatch
        seconds = between(np.diff(line.forward_s + line.backward_s, prepend=0.0))
        loads = held if by_bytes else seconds + line.cut_s[:, None] + line.cut_s[None, :]

        def stage(replicas: int, ahead: int) -> Floats:
            fits = (held <= limits[count - ahead]) & (replicas == 1)
            return stages_only(np.where(fits, loads, np.inf))

        found = replicate(stage, devices=count)
        return () if found is None else tuple(np.repeat(np.arange(count), np.diff(found.bounds)).tolist())

    def _problem(self) -> Problem:
        static = [0] * len(self.units)
        for state, unit in self.states:
            static[unit] += state_bytes(state, self.options).total
        costs = [self.costs.get(unit, ModuleCost()) for unit in self.units]  # some were never called
        works = tuple(
            Work(unit, cost.forward_s, BACKWARD * cost.forward_s, static_bytes=size)
            for unit, cost, size in zip(self.units, costs, static, strict=True)
        )
        links = [link_seconds(self.options, cost.output_bytes) for cost in costs[:-1]]
        limits = [self.options.capacity_bytes(stage) for stage in range(len(self.options.devices))]
        return Problem(
            works,
            tuple(TensorEdge(index, (index + 1,), link_s, link_s) for index, link_s in enumerate(links)),
            tuple(Hold(saved_below(self.costs, unit), index, (), (index,)) for index, unit in enumerate(self.units)),
            microbatches=1,
            schedule=_SCHEDULE,
            devices=devices_of(limits),
        )

    def plan(self) -> Plan:
        """Return the plan with its prediction."""
        stages = tuple(self._stage(index) for index in range(self.partition.stages))
        if idle := self._idle():
            warnings.warn(idle, UserWarning, stacklevel=3)
        step_s = sum(stage.forward_s + stage.backward_s for stage in stages)
        return Plan(
            fingerprint=fingerprint_of(self.model, self._names(self.stage_of)),
            devices=tuple(map(self.options.device_name, range(len(stages)))),
            stages=stages,
            boundaries=tuple(self._boundaries()),
            chunks=self.options.chunks,
            microbatch_rows=(self.rows,),
            schedule=_SCHEDULE,
            optimizer=str(self.options.optimizer),
            step_s=step_s,
            bubble=1.0 - 1.0 / len(stages) if step_s else 0.0,
            bottleneck_s=self.partition.costs.bottleneck_s,
            lower_bound_s=self.partition.lower_bound_s,
            status=self.partition.status,
            objective="bottleneck",
            **fit_of(stages),
            class_flops={"shared": 0.0, "micro": 0.0, "full": 1.0},
            measured=False,
            notes=tuple(self._notes()),
            rung=RUNG,
        )

    def _names(self, units: Iterable[str]) -> list[str]:
        return [f"{unit}#0" for unit in units]

    def _stage(self, index: int) -> StagePlan:
        units = [unit for unit, stage in self.stage_of.items() if stage == index]
        seconds = self.partition.costs.timeline.seconds
        states = [state for state, _ in self.states if self.home[state.name] == index]
        memory, names = self.partition.costs.stages[index], self._names(units)
        return StagePlan(
            index=index,
            device=self.options.device_name(index),
            nodes=tuple(names),
            modules=tuple(covered_modules(self.model, names)),
            parameters=sum(s.elements for s in states if s.is_parameter),
            forward_s=seconds["F"][index],
            backward_s=seconds["B"][index],
            memory=StageMemory(
                **bytes_of_states(states, self.options),
                activation_bytes=memory.activation_bytes,
                transient_bytes=memory.transient_bytes,
                peak_bytes=memory.peak_bytes,
                capacity_bytes=self.options.capacity_bytes(index),
                reserve_bytes=self.options.reserved_bytes(index),
            ),
        )

    def _boundaries(self) -> Iterable[Boundary]:
        for unit, following in pairwise(self.stage_of):
            producer, consumer = self.stage_of[unit], self.stage_of[following]
            if producer != consumer:
                size = self.costs.get(unit, ModuleCost()).output_bytes
                yield Boundary(value=f"{unit}#0", producer=producer, consumers=(consumer,), bytes=size)
        stages = stages_of_modules(self.model, self.stage_of)
        users: dict[int, set[int]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for parameter in module._parameters.values():
                users.setdefault(id(parameter), set()).add(stages[path])
        for name, parameter in self.model.named_parameters():
            first, *others = sorted(users[id(parameter)])
            if others:
                size = parameter.numel() * parameter.element_size()
                yield Boundary(value=name, producer=first, consumers=tuple(others), bytes=size, per_step=True)

    def _idle(self) -> str:
        given, used = len(self.options.devices), self.partition.stages
        few = f"{given} devices were given, but the model has only {len(self.units)} modules that can be placed"
        return f"{few}: using {plural(used, 'stage')}" if used < given else ""

    def _notes(self) -> Iterable[str]:
        if idle := self._idle():
            yield idle
        placed = f"{len(self.stage_of)} modules are placed"
        yield f"no graph can follow this model ({self.reason}): its own Python runs; {placed}"
        yield "one chunk: the stages run one after the other"
        if set(self.options.recompute or ()) - {"never"}:
            yield (
                f"recompute={list(self.options.recompute or ())} is ignored: the model runs by its own Python, where "
                "torch.utils.checkpoint in the model does the same"
            )
        yield "costs of modules are estimates"


def _states(model: nn.Module, home: dict[str, int]) -> list[tuple[StateProfile, int]]:
    """Return every parameter and buffer, and the unit that it lies with."""
    parameters = dict(model.named_parameters())
    states = []
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        size = tensor.numel() * tensor.element_size()
        state = StateProfile(
            name, tensor.numel(), size, tensor.requires_grad, name in parameters, (), tuple(tensor.shape)
        )
        states.append((state, home[name]))
    return states
