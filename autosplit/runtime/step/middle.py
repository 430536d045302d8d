"""A call of the pipe on lanes that run at the same time: all cells stand behind one autograd function.

    setup (autograd) ─► _Middle: forwards of all cells on their lanes ─► ending (autograd): merge, epilogue
                        _Middle.backward: backwards of all cells on their lanes

On the CPU autograd runs every node on the thread that calls backward. So each cell has a graph of its own, whose
backward its lane calls; to the caller's graph all of them are one node, between the batch and parameters, and
the outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autosplit.runtime.lanes.ambient import ThreadState, graph_is_kept, one_intra_op_thread
from autosplit.runtime.ops import OUT
from autosplit.runtime.step.cells import Cells, parameters
from autosplit.runtime.step.leaves import held_back
from autosplit.runtime.step.step import Start, Step
from autosplit.runtime.step.sums import Held, together
from autosplit.trace.borrowed.state import attributes

_AGAIN = "create_graph=True runs the forward again on lanes='threads'; split with lanes='inline' for that"
Leaf = tuple[str, Any, torch.Tensor]


def call(step: Step) -> Sequence[Any]:
    """Run the pipe on its lanes' threads and return the model's flat outputs; they are part of the caller's graph."""
    state, start = ThreadState.current(), step.start(ending=True)
    trained = parameters(step) if state.grad else {}
    leaves = _leaves(start, trained) if state.grad else []
    cells = Cells(step, start, trained, detached=bool(leaves))
    tensors = [tensor for *_, tensor in leaves]
    flat = iter(_Middle.apply(cells, state, leaves, *tensors) if leaves else _forward(cells, state))
    step.join_statistics()
    bundles = {
        stage: [tuple(next(flat) for _ in slots) for _ in step.sizes] for stage, slots in _out_slots(step).items()
    }
    return step.end(start, bundles)


def _leaves(start: Start, parameters: Mapping[Held, Sequence[torch.Tensor]]) -> list[Leaf]:
    """Return what the cells' gradients go to, as (kind, place, tensor): inputs, shared values and parameters."""
    leaves: list[Leaf] = [
        ("inputs", (stage, microbatch, position), tensor)
        for stage, bundles in start.inputs.items()
        for microbatch, bundle in enumerate(bundles)
        for position, tensor in enumerate(bundle)
    ]
    leaves += [("shared", (stage, p), t) for stage, bundle in start.shared.items() for p, t in enumerate(bundle)]
    firsts = {held.stage: tensors for held, tensors in parameters.items() if not held.replica}
    leaves += [("parameters", (stage, p), t) for stage, tensors in firsts.items() for p, t in enumerate(tensors)]
    return [leaf for leaf in leaves if leaf[2].requires_grad]


def _out_slots(step: Step) -> dict[int, Any]:
    stages = step.lowered.layout.stages
    return {stage: layout.sent[OUT] for stage, layout in enumerate(stages) if layout.sent.get(OUT)}


def _outputs(cells: Cells) -> list[torch.Tensor]:
    """Return what the stages give the epilogue and the caller, stage by stage, microbatch by microbatch."""
    count = len(cells.step.sizes)
    return [t for stage in _out_slots(cells.step) for m in range(count) for t in cells.cells[stage, m].sent[OUT]]


def _forward(cells: Cells, state: ThreadState) -> list[torch.Tensor]:
    cells.step.perform(cells.step.forwards, cells, state)
    return _outputs(cells)


class _Middle(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cells: Cells,
        state: ThreadState,
        leaves: list[Leaf],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.cells, ctx.state, ctx.leaves = cells, state, leaves
        ctx.versions = _versions(cells, tensors)
        outputs = _forward(cells, state)
        flat = tuple(tensor.detach() for tensor in outputs)
        ctx.mark_non_differentiable(*(f for f, o in zip(flat, outputs, strict=True) if not o.requires_grad))
        return flat

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cells: Cells | None = ctx.cells
        if cells is None:
            raise RuntimeError(
                "Trying to backward through the pipe a second time: what the first backward needed is freed. Specify "
                "retain_graph=True in the first backward, or split with lanes='inline'"
            )
        if torch.is_grad_enabled():
            return (None,) * 3 + tuple(_differentiable(ctx, gradients))
        leaves: list[Leaf] = ctx.leaves
        cells.keep = graph_is_kept()
        if not cells.keep:
            ctx.cells = ctx.leaves = None  # who keeps the loss keeps this node, and would keep the batch
        cells.clear()
        remaining = iter(gradients)
        for stage, slots in _out_slots(cells.step).items():
            for microbatch in range(len(cells.step.sizes)):
                cells.cells[stage, microbatch].out_gradients = [next(remaining) for _ in slots]
        if not all(torch._C._has_storage(g) for g in gradients if g is not None):  # of vmap, which no ``.grad`` takes
            for sums in cells.sums.values():
                sums.ask()
        cells.step.perform(cells.step.backwards, cells, within=cells.hooks_held_back())
        totals = [together(cells.replicas(stage), (), cells.step.brought) for stage in range(cells.last + 1)]
        grads = tuple(_gradient(cells, totals, kind, key) for kind, key, _ in leaves)
        cells.clear()
        return (None,) * 3 + grads


def _gradient(
    cells: Cells, totals: Sequence[Sequence[torch.Tensor | None]], kind: str, key: Any
) -> torch.Tensor | None:
    if kind == "inputs":
        return cells.input_gradients.get(key)
    stage, position = key
    return totals[stage][position + (len(cells.sums[Held(stage, 0)].parameters) if kind == "shared" else 0)]


def _differentiable(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Run the forwards again in one graph and differentiate that, so that the gradients have gradients."""
    cells: Cells = ctx.cells
    leaves = [tensor for *_, tensor in ctx.leaves]
    if _versions(cells, leaves) != ctx.versions:
        raise RuntimeError(f"a parameter or an input was changed in place since the forward; {_AGAIN}")
    if cells.lowered.changes_inputs:
        raise RuntimeError(f"the model changes its input in place; {_AGAIN}")
    with one_intra_op_thread():
        before, outputs = _outputs(cells), _again(ctx)
        if not all(_same(b, o) for b, o in zip(before, outputs, strict=True)):
            raise RuntimeError(f"the model gives other values when it runs again, as its state changed; {_AGAIN}")
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        if not pairs:
            return [None] * len(leaves)
        roots, seeds = zip(*pairs, strict=True)
        with held_back(leaves):
            return torch.autograd.grad(roots, leaves, seeds, create_graph=True, allow_unused=True)


def _again(ctx: Any) -> list[torch.Tensor]:
    """Run all forwards again, in the caller's thread and graph, and return their outputs."""
    cells: Cells = ctx.cells
    step = replace(cells.step, state=cells.step.state.again(), threads=None, replicas=())  # these have other parameters
    again = Cells(step, cells.start, {}, detached=False)
    try:
        with _copied_buffers(cells.lowered.traced.root), ctx.state.autocast():
            step.perform(step.forwards, again)
            return _outputs(again)
    finally:
        torch.clear_autocast_cache()  # the caller's autocast context, which would clear it, ended with the forward


@contextlib.contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """Give a model copies of its buffers, so that what is written goes there; its own come back at the end.

    Own buffers put back in place would count as changed, which a backward that saved them refuses.
    """
    with attributes(model):
        copies: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        yield


def _versions(cells: Cells, leaves: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each leaf and each input of the call was changed in place."""
    return [tensor._version for tensor in (*leaves, *cells.step.tensors) if not tensor.is_inference()]


def _same(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether all values are equal; nan equals nan here."""
    return bool(((first == other) | (first != first) & (other != other)).all())
