"""Further replicas of stages: the same recording on stand-ins of the model's modules.

    replica 0      the model's modules, parameters and buffers
    replica 1, 2   stand-ins of the modules; at the start of a step they get the model's parameters and buffers:
                   themselves on the device where they lie, copies elsewhere

Two lanes run one stage at the same time. With modules of their own neither sees what the other puts into its modules.

Private torch interface: ``nn.Module._replicate_for_data_parallel``, by which modules with tables of their own (such as
recurrent layers) are copied before their parameters are set; tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.lower.program import ending_slots
from autosplit.runtime.lower.region import StatePlace
from autosplit.runtime.lower.split import Lowered, lower
from autosplit.runtime.ops import transfer
from autosplit.runtime.step.attributes import STANDS_FOR, StandsFor
from autosplit.trace.graph import INFO
from autosplit.trace.rows.kinds import renormalises


@dataclass(frozen=True)
class Replicas:
    """What runs the second replica of each stage that has one, or the third, and so on.

    Attributes:
        lowered: the stages, which read stand-ins of the modules of ``root``.
        lanes: the lanes of the replicas by their stages.
        places: by stage where stand-ins hold the parameters and buffers that it uses.
        root: the model's own modules.
    """

    lowered: Lowered
    lanes: Mapping[int, Lane]
    places: Mapping[int, Sequence[StatePlace]]
    root: nn.Module

    def refresh(self, lanes: Sequence[Lane]) -> None:
        """Give the stand-ins the model's parameters and buffers; ``lanes`` are those of the stages' first replicas."""
        for stage, lane in self.lanes.items():
            copies: dict[int, torch.Tensor] = {}
            for path, table, name, holder in self.places[stage]:
                tensor = getattr(self.root.get_submodule(path), table)[name]
                if id(tensor) not in copies:
                    copies[id(tensor)] = _on(lane, tensor, lanes[stage])
                getattr(holder, table)[name] = copies[id(tensor)]


def _on(lane: Lane, tensor: torch.Tensor, source: Lane) -> torch.Tensor:
    """Return a tensor of one lane's device on another lane's: itself, or a copy that is a leaf."""
    if lane.device == source.device:
        return tensor
    with torch.no_grad():
        copy = transfer((tensor.detach(),), source, lane)[0]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def replicated(
    lowered: Lowered,
    stage_of: Mapping[str, int],
    lanes: Sequence[Sequence[Lane]],
    *,
    compiled: Mapping[str, Any] | None,
) -> tuple[Replicas, ...]:
    """Return what runs further replicas; ``lanes`` are those of each stage's replicas, the first's too.

    Raises InputError where cells of a stage with replicas change the model.
    """
    check_cells(lowered, [len(each) for each in lanes])
    replicas = []
    for number in range(1, max(map(len, lanes))):
        lane_of = {stage: each[number] for stage, each in enumerate(lanes) if number < len(each)}
        twins: dict[int, nn.Module] = {}
        root = stand_in(lowered.traced.root, twins)
        for twin in twins.values():
            twin.__dict__["_buffers"] = dict(twin._buffers)
        devices = [lane_of.get(stage, each[0]).device for stage, each in enumerate(lanes)]
        traced = replace(lowered.traced, root=root)
        parts = lower(traced, stage_of, devices, recompute=lowered.recompute, compiled=compiled)
        places = {stage: tuple(dict.fromkeys(parts.stages[stage].places())) for stage in lane_of}
        replicas.append(Replicas(parts, lane_of, places, lowered.traced.root))
    return tuple(replicas)


def check_cells(lowered: Lowered, replicas: Sequence[int]) -> None:
    """Raise InputError where cells of a stage with replicas change the model."""
    for stage, count in enumerate(replicas):
        for node in lowered.layout.stages[stage].nodes if count > 1 else ():
            if renormalises(node, lowered.traced.root):
                raise InputError(
                    f"stage {stage} has {count} replicas, and {node.meta[INFO].name!r} looks up a table with "
                    "max_norm, which it changes for each microbatch; give that stage one replica"
                )


def check_ending(lowered: Lowered, weights: Collection[str], count: int) -> None:
    """Raise InputError if the last stage has several ranks, and the epilogue writes state or reads ``weights``."""
    if count == 1:
        return
    whose = f"behind all microbatches, on the first of the last stage's {count} replicas"
    for info in (node.meta[INFO] for node in lowered.layout.epilogue):
        if used := [*info.writes, *(name for name in info.reads if name in weights)]:
            does = "changes" if info.writes else "uses"
            raise InputError(
                f"{info.name!r} {does} {used[0]!r} once per step, {whose}, which each have their own; give that stage "
                "one replica"
            )
    if slots := ending_slots(lowered):
        raise InputError(
            f"{slots[0].value!r}, which is made once per step, is returned or used {whose}; give that stage one replica"
        )


def stand_in(module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
    """Return a module with parameters of its own that shares all else with another, also its buffers and hooks."""
    if id(module) in twins:
        return twins[id(module)]
    twin: nn.Module = module._replicate_for_data_parallel()
    twins[id(module)] = twin
    known = vars(module).get(STANDS_FOR)
    twin.__dict__[STANDS_FOR] = StandsFor(known.module if known else module, dict(vars(module)))
    twin.__dict__["_buffers"] = module._buffers
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_modules"] = {n: None if m is None else stand_in(m, twins) for n, m in module._modules.items()}
    return twin
