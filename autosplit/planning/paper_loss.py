"""A loss function on paper: what it costs and keeps, on the model's output without values and a target made up for it.

Tried are the output alone, then with targets: class indices (the output without its last or second dimension), then
values like the output. The first with which the loss is a scalar is the one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from autosplit.errors import InputError
from autosplit.profile.lowering import CudaKernels
from autosplit.profile.node_costs.fake import empty_value, fake_mode
from autosplit.profile.node_costs.ledger import Ledger, Operation
from autosplit.profile.node_costs.work import cost_model_of, work_of
from autosplit.profile.stage_trace.stage_graph import first_output
from autosplit.profile.types import Profile
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO, NodeClass, TracedGraph
from autosplit.trace.recording.run import quiet_log
from cost_models.specs import DeviceSpec

_TRIED_ROWS = 3


@dataclass(frozen=True)
class PaperLoss:
    """The loss of a microbatch, from the first output that is differentiable and the number of rows.

    ``target`` makes a target of an output; None where the loss takes none.
    """

    function: Callable[..., Any]
    traced: TracedGraph = field(repr=False)
    name: str
    """The stable name of that output."""
    target: Callable[[torch.Tensor], torch.Tensor] | None

    def __call__(self, value: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the loss; the model's other outputs are as recorded, without values."""
        node = self.traced.by_name()[self.name]
        leaves = [value if leaf is node else _other(leaf, rows) for leaf in _outputs(self.traced)]
        output = self.traced.unflatten(leaves)
        args = (output,) if self.target is None else (output, self.target(value))
        total: torch.Tensor = self.function(*args)
        return total


def paper_loss(function: Any, traced: TracedGraph) -> PaperLoss:
    """Return a loss function as it can be called for a recorded model; raises InputError where it cannot."""
    if not callable(function):
        raise InputError(
            f"loss_fn is a {type(function).__name__}; give a function of the output, or of it and a target"
        )
    node = first_output(traced)
    if node is None:
        raise InputError("loss_fn is given, but the model has no output that gradients flow through; leave it out")
    errors: list[Exception] = []
    for target in _targets(node):
        loss = PaperLoss(function, traced, node.meta[INFO].name, target)
        try:
            with _fake_run(None):
                total = loss(empty_value(node, _TRIED_ROWS, needs_grad=True), _TRIED_ROWS)
            if isinstance(total, torch.Tensor) and total.dim() == 0 and total.requires_grad:
                return loss
            errors.append(ValueError(f"it returns {_described(total)}, no scalar that gradients flow through"))
        except Exception as raised:
            errors.append(raised)
    # A TypeError may only say that it takes fewer or more arguments.
    error = next((raised for raised in errors[::-1] if not isinstance(raised, TypeError)), errors[-1])
    shape = list(node.meta[INFO].tensors[0].shape_at(_TRIED_ROWS))
    raise InputError(
        f"loss_fn cannot be called on the model's output of shape {shape} ({_TRIED_ROWS} rows) and a target of class "
        f"indices or that shape: {type(error).__name__}: {error}; give a function of the output alone that makes its "
        "target, such as lambda output: loss(output, torch.zeros_like(output))"
    ) from error


def note_on_no_loss(traced: TracedGraph) -> str | None:
    """Return a note on the loss that is assumed; None if the model returns a loss, or nothing with a gradient."""
    node = first_output(traced)
    if node is None or not node.meta[INFO].tensors[0].shape_at(_TRIED_ROWS):
        return None
    return (
        "no loss is given: the mean of the first output stands for it, a real one takes time and memory of its own "
        "(loss_fn=, --loss, or labels for a model that makes its loss)"
    )


def with_loss(
    costs: Profile, loss: PaperLoss, *, batch_rows: int, device: DeviceSpec | str, kernels: Literal["cpu", "cuda"]
) -> Profile:
    """Return a profile in which the node that makes the output also computes the loss."""
    node, cost = loss.traced.by_name()[loss.name], costs.nodes.get(loss.name)
    if cost is None:
        return costs
    rows = batch_rows if node.meta[INFO].node_class is NodeClass.FULL else costs.rows
    with _fake_run(kernels) as (ledger, lowering):
        value = empty_value(node, rows, needs_grad=True)
        before = ledger.live_bytes
        ledger.open()
        with lowering:
            total = loss(value, rows)
        forward = tuple(ledger.operations)
        torch.autograd.grad(total, value, torch.empty_like(total))
        both, peak = tuple(ledger.operations), ledger.peak_bytes - before
    model = cost_model_of(device)

    def seconds(operations: tuple[Operation, ...]) -> float:
        return sum(model.seconds(work_of(operation)) for operation in operations)

    backward = both[len(forward) :]
    changed = replace(
        cost,
        forward_s=cost.forward_s + seconds(forward),
        backward_s=cost.backward_s + seconds(backward),
        forward_operations=cost.forward_operations + forward,
        backward_operations=cost.backward_operations + backward,
        backward_transient_bytes=max(cost.backward_transient_bytes, peak),
    )
    return replace(costs, nodes={**costs.nodes, loss.name: changed}, before_loss=cost)


@contextlib.contextmanager
def _fake_run(
    kernels: Literal["cpu", "cuda"] | None,
) -> Iterator[tuple[Ledger, contextlib.AbstractContextManager[Any]]]:
    mode, ledger = fake_mode(), Ledger(kernels=kernels or "cpu")
    lowering: contextlib.AbstractContextManager[Any] = CudaKernels() if kernels == "cuda" else contextlib.nullcontext()
    with random_state(), torch.inference_mode(False), torch.enable_grad(), quiet_log(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a target of another shape is only warned of
        with mode, ledger:
            yield ledger, lowering


def _targets(node: fx.Node) -> Iterator[Callable[[torch.Tensor], torch.Tensor] | None]:
    yield None
    dims = len(node.meta[INFO].tensors[0].shape)
    if dims > 1 and node.meta[INFO].tensors[0].shape_at(_TRIED_ROWS)[-1] > 1:
        yield lambda value: torch.empty(value.shape[:-1], dtype=torch.int64, device=value.device)
        yield lambda value: torch.empty((*value.shape[:1], *value.shape[2:]), dtype=torch.int64, device=value.device)
    yield lambda value: torch.empty_like(value, requires_grad=False)


def _outputs(traced: TracedGraph) -> list[Any]:
    return list(next(iter(reversed(traced.graph.nodes))).args[0])


def _other(leaf: Any, rows: int) -> Any:
    return empty_value(leaf, rows, needs_grad=False) if isinstance(leaf, fx.Node) and INFO in leaf.meta else leaf


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
