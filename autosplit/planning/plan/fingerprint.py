"""What a plan was made for, and whether a model is it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from autosplit.errors import PlanError
from autosplit.planning.plan.diff import entries_that_differ
from autosplit.planning.plan.parts import Fingerprint
from autosplit.planning.plan.plan import Plan
from autosplit.trace.graph import TracedGraph

_NAMED = 4
"""How many entries an error names."""


def state_entries(model: nn.Module) -> list[str]:
    """List names and shapes of all parameters and buffers; dtypes may change under a plan (``.double()``)."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return sorted(f"{name}{list(tensor.shape)}" for name, tensor in tensors)


def fingerprint(model: nn.Module, traced: TracedGraph) -> Fingerprint:
    """Return the fingerprint of a model and of the recording that was planned."""
    return fingerprint_of(model, [info.name for _, info in traced.compute_nodes()])


def fingerprint_of(model: nn.Module, nodes: list[str]) -> Fingerprint:
    """Return the fingerprint of a model and of the nodes that were planned."""
    entries = tuple(state_entries(model))
    return Fingerprint(
        model=type(model).__name__,
        state=_hash(entries),
        nodes=_hash(nodes),
        torch=str(torch.__version__),
        entries=entries,
    )


def check_plan(plan: Plan, model: nn.Module, *, devices: int) -> None:
    """Raise PlanError when a plan was made for another model or for more devices."""
    found, planned = state_entries(model), plan.fingerprint
    if planned.state != _hash(found):
        different = entries_that_differ(planned.entries, found) if planned.entries else []
        more = f"; {len(different) - _NAMED} more differ" if len(different) > _NAMED else ""
        which = f": {'; '.join(different[:_NAMED])}{more}" if different else f" ({len(found)} entries)"
        raise PlanError(
            f"the plan was made for {planned.model} with other parameters or buffers than this {type(model).__name__} "
            f"has{which}; plan again: autosplit(model, ...) without plan="
        )
    if len(plan.devices) > devices:
        raise PlanError(f"the plan has {len(plan.devices)} lanes, devices names {devices}; give one device per lane")


def _hash(entries: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]
