"""One training step: which loss each microbatch adds, then the cells in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from autosplit.errors import InputError
from autosplit.runtime import loss as losses
from autosplit.runtime import train_cells
from autosplit.runtime.cells import Step
from autosplit.runtime.lanes import Lane
from autosplit.runtime.ops import bring
from autosplit.runtime.threads import LaneThreads
from autosplit.trace import state
from autosplit.trace.graph import INFO
from autosplit.trace.structure import flatten_output


def train_step(
    step: Step,
    *,
    target: Any,
    loss_fn: Any,
    reduction: str,
    proved: dict[int, tuple[Any, str]],
    whole: Callable[[], Any],
    threads: LaneThreads | None,
) -> torch.Tensor:
    """Run forward, loss and backward of a whole batch; see :meth:`PipelinedModule.train_step`.

    ``whole`` runs the ordinary program on the step; it is used where the loss needs the whole batch at once.
    ``threads`` run the lanes at the same time; without them the caller's thread issues everything.
    """
    _check_loss(loss_fn)
    lowered = step.lowered
    target = _with_outputs(target, step.lanes)
    targets = losses.split_target(target, step.sizes, batch_dims=_output_dims(step))
    if lowered.epilogue is not None or len(step.sizes) == 1 or _has_graph(target):
        return whole_step(whole, target=target, loss_fn=loss_fn, lanes=lambda: step.lanes)
    known = losses.known_reduction(loss_fn, reduction)
    if known is not None:
        return train_cells.run(step, losses.per_microbatch(known, loss_fn, step.sizes, targets), None, threads)
    if id(loss_fn) in proved:
        kind = proved[id(loss_fn)][1]
    else:
        proof = _prove(step, loss_fn, target, targets, whole)
        kind = proof.kind
        if proof.conclusive:
            proved[id(loss_fn)] = loss_fn, kind
    check = losses.WholeCheck(loss_fn, target, kind)
    return train_cells.run(step, losses.per_microbatch(kind, loss_fn, step.sizes, targets), check, threads)


def _has_graph(target: Any) -> bool:
    """Tell whether a target was computed with gradients: microbatches share its graph, so one backward takes it."""
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(target))


def whole_step(
    whole: Callable[[], Any], *, target: Any, loss_fn: Any, lanes: Callable[[], Sequence[Lane]]
) -> torch.Tensor:
    """Run the loss on the output of the whole batch, and its backward.

    ``lanes`` are the stages' and last the caller's, as they are when ``whole`` has run.
    """
    _check_loss(loss_fn)
    output = _gathered(whole(), lanes())
    value = losses.call_loss(loss_fn, output, _with_outputs(target, lanes()))
    value.backward()
    return value.detach()


def _check_loss(loss_fn: Any) -> None:
    if loss_fn is None:
        raise InputError("train_step needs loss_fn=, a function loss_fn(output, target) that returns a scalar")


def _with_outputs(target: Any, lanes: Sequence[Lane]) -> Any:
    """Return a target that lies on the caller's device on the last stage's, in the caller's order."""
    *_, last, caller = lanes
    if not (last.asynchronous or caller.asynchronous):
        return target
    with torch.inference_mode(False), torch.enable_grad():
        return bring(target, caller, last.here())


def _gathered(output: Any, lanes: Sequence[Lane]) -> Any:
    """Return the model's output on the last stage's device, in the caller's order; on CPU lanes that is what it is."""
    if not any(lane.asynchronous for lane in lanes):
        return output
    flat, rebuild = flatten_output(output)
    target = lanes[-2].here()
    for source in {lane.device: lane.here() for lane in lanes}.values():
        if source.device != target.device:
            flat = bring(flat, source, target)
    return rebuild(flat)


def _output_dims(step: Step) -> dict[tuple[int, ...], int]:
    """Map the shapes of the outputs to their batch dimensions: a target of such a shape has its batch there."""
    found = {}
    for value, dim in zip(step.lowered.outputs, step.lowered.traced.batch_outputs, strict=True):
        if dim is not None:
            found[value.meta[INFO].tensors[0].shape_at(step.rows, step.lengths)] = dim
    return found


def _prove(step: Step, loss_fn: Any, target: Any, targets: Sequence[Any], whole: Callable[[], Any]) -> losses.Proof:
    traced = step.lowered.traced
    with torch.no_grad(), state.random_state(), state.buffer_contents(traced.root):
        output = whole()
    output = _gathered(output, step.lanes)
    flat, rebuild = flatten_output(output)

    def part(microbatch: int | None) -> Any:
        if microbatch is None:
            return output
        start = sum(step.sizes[:microbatch])
        leaves = []
        for leaf, dim in zip(flat, traced.batch_outputs, strict=True):
            if dim is None:
                leaves.append(leaf)
            else:
                factor = leaf.shape[dim] // step.rows
                leaves.append(leaf.narrow(dim, start * factor, step.sizes[microbatch] * factor))
        return rebuild(leaves)

    return losses.prove(loss_fn, part, target, targets, step.sizes)
