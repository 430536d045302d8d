"""One profile of a recording: bytes and FLOPs from the fake pass, times from the device or from a cost model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from autosplit.errors import DeviceError
from autosplit.profile.blocks import CostMemo
from autosplit.profile.measured import measure as measure_nodes
from autosplit.profile.node_costs.ledger import Operation
from autosplit.profile.node_costs.work import cost_model_of, work_of
from autosplit.profile.types import MeasuredNode, MeasuredTimes, NodeProfile, NodeTimes, Profile, StateProfile
from autosplit.progress import phase
from autosplit.trace.borrowed.blank import has_meta
from autosplit.trace.graph import INFO, TracedGraph
from cost_models.specs import DeviceSpec
from cost_models.work import CostModel

_IN_BYTE = {"Params4bit": 2}
"""How many elements of a weight an element of its tensor is, by the parameter's class: bitsandbytes packs two."""


def profile(
    traced: TracedGraph,
    *,
    rows: int,
    batch_rows: int,
    inputs: Sequence[torch.Tensor] | None = None,
    measure: bool = True,
    device: str | DeviceSpec = "cpu-lane",
    kernels: Literal["cpu", "cuda"] = "cpu",
    memo: CostMemo | None = None,
) -> Profile:
    """Return what every node, parameter and buffer costs in training, for a microbatch of ``rows`` batch rows.

    ``full`` nodes cost what they do on a batch of ``batch_rows``. ``inputs`` are the input tensors in the order of the
    placeholders, at exactly ``rows`` rows. The times are measured when ``measure`` is set, inputs are given and the
    model is not on "meta"; else they are those of ``device`` by its cost model, see `cost_model_of`. ``full`` nodes are
    not measured: the cost model gives their times, scaled as the measured nodes came out against it. So it does for
    nodes that memory runs out for, with a warning. ``kernels``: whose kernels' results and scratch are counted.
    ``memo`` is for profiles of one recording that follow each other.
    """
    grads = None if inputs is None else tuple(tensor.requires_grad for tensor in inputs)
    with phase("profiling"):
        memo = memo or CostMemo(traced)
        costs = memo.costs(rows=rows, batch_rows=batch_rows, input_grads=grads, kernels=kernels)
        times = modelled_times(costs, model=cost_model_of(device))
    name = device.name if isinstance(device, DeviceSpec) else device
    measured = MeasuredTimes({}, name)
    nodes = {node: memo.timed(cost, times[node], name) for node, cost in costs.items()}
    if measure and inputs is not None and not (has_meta(traced.root) or any(tensor.is_meta for tensor in inputs)):
        measured = measure_nodes(traced, inputs=inputs, rows=rows)
        _warn_of_memory(measured)
        times = _completed(costs, measured.nodes, times)
        nodes = {node: _timed(cost, times[node], measured.nodes.get(node)) for node, cost in costs.items()}
    placeholders = [info for node in traced.graph.nodes if node.op == "placeholder" and (info := node.meta.get(INFO))]
    return Profile(
        rows=rows,
        nodes=nodes,
        state=_state(traced),
        input_bytes={info.name: info.tensors[0].bytes_at(rows) for info in placeholders},
        input_grads={info.name: grad for info, grad in zip(placeholders, grads or (), strict=False)},
        times=measured if measured.nodes else replace(measured, device=name),
    )


def modelled_times(costs: Mapping[str, NodeProfile], *, model: CostModel) -> dict[str, NodeTimes]:
    """Return the times that a cost model gives to every node, by stable name.

    Raises DeviceError with a node's name where the device cannot do what it does, as in a dtype that it lacks.
    """

    known: dict[int, float] = {}  # by the lists that nodes of repeated blocks share

    def seconds(operations: Sequence[Operation]) -> float:
        if id(operations) not in known:
            known[id(operations)] = sum(model.seconds(work_of(operation)) for operation in operations)
        return known[id(operations)]

    times = {}
    for name, node in costs.items():
        try:
            times[name] = NodeTimes(seconds(node.forward_operations), seconds(node.backward_operations))
        except ValueError as error:
            raise DeviceError(f"node {name!r}: {error}") from error
    return times


def _warn_of_memory(measured: MeasuredTimes) -> None:
    """Warn of what did not run because memory ran out: the first is the node that did not fit."""
    if measured.out_of_memory:
        name, why = next(iter(measured.out_of_memory.items()))
        others = len(measured.out_of_memory) - 1
        warnings.warn(
            f"{name}: {why}; a cost model gives its time"
            + (f", and those of what did not run after it ({others})" if others else "")
            + "; take fewer rows (more chunks), or a device with more memory",
            UserWarning,
            stacklevel=3,
        )


def _completed(
    costs: Mapping[str, NodeProfile], measured: Mapping[str, MeasuredNode], modelled: Mapping[str, NodeTimes]
) -> dict[str, NodeTimes]:
    """Return the measured times, and for the nodes that lack one the modelled time in the measured scale.

    Nodes with FLOPs and nodes that only move bytes have a scale each.
    """
    scales = {}
    for computes in (True, False):
        names = [name for name in measured if (costs[name].forward_flops > 0) is computes]
        scales[computes] = NodeTimes(
            _ratio([measured[n].forward_s for n in names], [modelled[n].forward_s for n in names]),
            _ratio([measured[n].backward_s for n in names], [modelled[n].backward_s for n in names]),
        )
    completed = {}
    for name, cost in costs.items():
        scale, model = scales[cost.forward_flops > 0], modelled[name]
        estimate = NodeTimes(model.forward_s * scale.forward_s, model.backward_s * scale.backward_s)
        completed[name] = measured.get(name, estimate)
    return completed


def _ratio(measured_s: Sequence[float], modelled_s: Sequence[float]) -> float:
    """Return the ratio of measured to modelled time, over the nodes with a modelled time; 1 if there are none."""
    pairs = [(a, b) for a, b in zip(measured_s, modelled_s, strict=True) if b > 0]
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else 1.0


def _timed(cost: NodeProfile, times: NodeTimes, measured: MeasuredNode | None) -> NodeProfile:
    split = None if measured is None else measured.split
    return replace(cost, forward_s=times.forward_s, backward_s=times.backward_s, split=split)


def _state(traced: TracedGraph) -> dict[str, StateProfile]:
    parameters = dict(traced.root.named_parameters(remove_duplicate=False))
    tensors = parameters | dict(traced.root.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    uses: dict[str, list[str]] = {name: [] for name in first.values()}
    for _, info in traced.compute_nodes():
        for name in dict.fromkeys(first[id(tensors[read])] for read in info.reads if read in tensors):
            uses[name].append(info.name)
    return {
        name: StateProfile(
            name=name,
            elements=tensors[name].numel() * _IN_BYTE.get(type(tensors[name]).__name__, 1),
            bytes=tensors[name].numel() * tensors[name].element_size(),
            trainable=tensors[name].requires_grad,
            is_parameter=name in parameters,
            uses=tuple(users),
            shape=tuple(tensors[name].shape),
        )
        for name, users in uses.items()
    }
