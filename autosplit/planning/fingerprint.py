"""What a plan was made for, and whether a model is it."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from autosplit.errors import PlanError
from autosplit.planning.plan import Plan
from autosplit.planning.records import Fingerprint
from autosplit.trace.graph import TracedGraph


def state_entries(model: nn.Module) -> list[str]:
    """List names and shapes of all parameters and buffers; dtypes may change under a plan (``.double()``)."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return sorted(f"{name}{list(tensor.shape)}" for name, tensor in tensors)


def fingerprint(model: nn.Module, traced: TracedGraph) -> Fingerprint:
    """Return the fingerprint of a model and of the recording that was planned."""
    return fingerprint_of(model, [info.name for _, info in traced.compute_nodes()])


def fingerprint_of(model: nn.Module, nodes: list[str]) -> Fingerprint:
    """Return the fingerprint of a model and of the nodes that were planned."""
    return Fingerprint(
        model=type(model).__name__,
        state=_hash(state_entries(model)),
        nodes=_hash(nodes),
        torch=str(torch.__version__),
    )


def check_plan(plan: Plan, model: nn.Module, *, devices: int) -> None:
    """Raise PlanError when a plan was made for another model or for more devices."""
    if plan.fingerprint.state != _hash(state_entries(model)):
        raise PlanError(
            f"the plan was made for {plan.fingerprint.model} with other parameters or buffers than this "
            f"{type(model).__name__} has ({len(state_entries(model))} entries, fingerprint "
            f"{_hash(state_entries(model))}, the plan's is {plan.fingerprint.state}); plan again: "
            "autosplit(model, ...) without plan="
        )
    if len(plan.devices) > devices:
        raise PlanError(f"the plan has {len(plan.devices)} lanes, devices names {devices}; give one device per lane")


def _hash(entries: list[str]) -> str:
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]
