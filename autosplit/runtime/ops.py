"""The words of the pipelined program: split, transfer, record, merge, and what keeps the numbers the same.

A *bundle* is a tuple of tensors that travel together: everything that one stage sends to one other stage for one
microbatch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx.node import has_side_effect

from autosplit.runtime.lanes.ambient import is_transformed
from autosplit.runtime.lanes.lanes import Bundle as Bundle
from autosplit.runtime.lanes.lanes import Lane, generators
from autosplit.runtime.tape import DRAWING, Tape

OUT = "out"
"""The name, among a stage's bundles, of the one for the epilogue and the caller."""
SHARED, ENDING = -1, -2
"""The microbatch of what goes, or is drawn, once per step: before the first cell, and behind the last."""


@dataclass(frozen=True)
class CallState:
    """What all cells of one call share, besides values.

    Attributes:
        seed: where the random draws begin that are not on the tape.
        tape: the plain model's random numbers; None where all operations draw by the seed.
        statistics: what norms saw, by the name of the call (:mod:`autosplit.runtime.norms`).
        update_each: whether every microbatch is an update of running statistics, as in the plain model's loop.
        microbatches: how many there are.
        whole: whether there is one, and it is the whole batch.
        before: how many microbatches of a larger batch stand before these; the draws by the seed count them.
    """

    seed: int = 0
    tape: Tape | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    update_each: bool = False
    microbatches: int = 1
    whole: bool = False
    before: int = 0

    def fresh(self) -> CallState:
        """Return the state of another run of the same call."""
        return replace(self, tape=self.tape and self.tape.fresh(), statistics={})

    def again(self) -> CallState:
        """Return the state of a run that repeats this one."""
        return replace(self, tape=self.tape and self.tape.again(), statistics={})


class CellContext(NamedTuple):
    """Which cell an operation runs in: the call's state, and the microbatch, or `SHARED`, or `ENDING`."""

    state: CallState
    microbatch: int


def split(
    bundle: Bundle, sizes: Sequence[int], dims: Sequence[int], lane: Lane, changed: Sequence[bool] = ()
) -> tuple[Bundle, ...]:
    """Cut every tensor into microbatches along its batch dimension and bring them from the caller to a lane.

    Where the model changes an input in place (``changed``), each microbatch counts its versions itself, once for all
    uses, and writes to the caller's tensor, as the model would.
    """
    parts = []
    private: dict[int, list[torch.Tensor]] = {}
    for tensor, dim, is_changed in zip(bundle, dims, changed or (False,) * len(dims), strict=True):
        if is_changed and id(tensor) in private:
            parts.append(private[id(tensor)])
            continue
        pieces = rows_along(tensor, sizes, dim)
        if is_changed:
            pieces = [piece.data for piece in pieces]
        origin = lane.origin(tensor)
        parts.append([transfer((piece,), origin, lane)[0] for piece in pieces])
        private[id(tensor)] = parts[-1]
    return tuple(zip(*parts, strict=True))


def rows_along(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    """Cut a tensor into microbatches; they are contiguous where it is, and may be changed in place."""
    if len(sizes) == 1:
        return [tensor]
    factor = tensor.shape[dim] // sum(sizes)
    starts = [factor * sum(sizes[:m]) for m in range(len(sizes))]
    pieces = [tensor.narrow(dim, start, factor * size) for start, size in zip(starts, sizes, strict=True)]
    return [piece.contiguous() for piece in pieces] if dim and tensor.is_contiguous() else pieces


def merge(
    bundles: Sequence[Bundle], dims: Sequence[int], lane: Lane, layouts: Sequence[Sequence[int] | None] = ()
) -> Bundle:
    """Join the microbatches of every tensor of a bundle along its batch dimension, on the lane that made them.

    ``layouts``: the order of each tensor's dimensions in the plain model's memory, where it is not their own.
    """
    if len(bundles) == 1:
        return tuple(bundles[0])
    with lane.active():
        pieces = zip(*bundles, strict=True)
        return tuple(map(_joined, pieces, dims, layouts or (None,) * len(dims)))


def _joined(pieces: Sequence[torch.Tensor], dim: int, layout: Sequence[int] | None) -> torch.Tensor:
    if layout is None:
        return torch.cat(tuple(pieces), dim)
    together = torch.cat([piece.permute(*layout) for piece in pieces], layout.index(dim))
    return together.permute([layout.index(index) for index in range(len(layout))])


def transfer(bundle: Bundle, source: Lane, target: Lane, done: Any = None) -> Bundle:
    """Bring a bundle from one lane to another: a copy between devices, on one device the tensors themselves.

    The target waits for ``done``, the event behind the cell that made the bundle, and not for later cells; without it
    for all work of the source so far. Gradients return by a transfer too, and so do their gradients.
    """
    if not (source.asynchronous or target.asynchronous):
        return bundle
    target.wait(source.record() if done is None else done)
    if source.device == target.device or not (torch.is_grad_enabled() and any(t.requires_grad for t in bundle)):
        return target.fetch(bundle, source)
    with source.active():
        bundle = _Departure.apply(*bundle)
    with target.active():
        return _Transfer.apply(source.now(), target.now(), *bundle)


def bring(tree: Any, source: Lane, target: Lane) -> Any:
    """Bring those of a tree's tensors that lie on one lane's device to another lane."""
    leaves, spec = pytree.tree_flatten(tree)
    places = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and target.origin(leaf).device == source.device
    ]
    for index, moved in zip(places, transfer(tuple(leaves[p] for p in places), source, target), strict=True):
        leaves[index] = moved
    return pytree.tree_unflatten(leaves, spec)


class _Departure(torch.autograd.Function):
    """Stands on the source's stream, so that autograd goes on there with the gradients that came back.

    Between two nodes autograd makes the stream that the second one's forward ran on wait for the first one's. What
    :class:`_Transfer` brings back is ready on the source's stream, not on its own.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Bundle:
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*_without_gradient(ctx, outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


class _Transfer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Lane, target: Lane, *tensors: torch.Tensor) -> Bundle:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target = source, target
        moved = target.fetch(tensors, source)
        outputs = tuple(m.detach() if m is t else m for m, t in zip(moved, tensors, strict=True))
        ctx.mark_non_differentiable(*_without_gradient(ctx, outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        present = tuple(gradient for gradient in gradients if gradient is not None)
        back = iter(transfer(present, ctx.target, ctx.source))
        return (None, None, *(None if gradient is None else next(back) for gradient in gradients))


def _without_gradient(ctx: Any, outputs: Bundle) -> list[torch.Tensor]:
    needs = ctx.needs_input_grad[-len(outputs) :]
    return [output for output, needed in zip(outputs, needs, strict=True) if not needed]


def on_lane(module: Any, lane: Lane) -> Any:
    """Return a module or function that runs on a lane; for a lane on the CPU that is the module itself."""
    return _OnLane(module, lane) if lane.asynchronous else module


class _OnLane(nn.Module):
    def __init__(self, module: Any, lane: Lane) -> None:
        super().__init__()
        self.module = module
        self.lane = lane

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lane.active():
            return self.module(*args, **kwargs)


def enter(caller: Lane, lanes: Sequence[Lane]) -> None:
    """Before a step: let every lane wait for the caller, on the caller's device and on the lane's own.

    The batch was made on the one; parameters were changed, by an optimizer say, on the other.
    """
    for lane in lanes:
        if lane.asynchronous:
            lane.wait(lane.here().record())
            if caller.asynchronous and caller.device != lane.device:
                lane.wait(caller.record())


def leave(caller: Lane, lanes: Sequence[Lane], tensors: Sequence[Any]) -> None:
    """After a step, also a failed one: let the caller, on every device, wait for all lanes, and keep what it is given.

    ``tensors`` are the outputs; what is no tensor is passed over. The host does not wait.
    """
    busy = [lane for lane in lanes if lane.asynchronous]
    if not busy:
        return
    done = [lane.record() for lane in busy]
    for here in {lane.device: lane.here() for lane in (*busy, caller) if lane.asynchronous}.values():
        for event in done:
            here.wait(event)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            busy[0].origin(tensor).keep(tensor)


def record(lane: Lane) -> Any:
    """Return an event for the work that the lane was given so far."""
    return lane.record()


def alias(value: torch.Tensor) -> torch.Tensor:
    """Return a view of its own for one use of a value that is used several times.

    What one use sends back is summed in its view before it meets the other uses' gradients, so that the order of
    additions, and with it every bit, is the same wherever the cut falls.
    It may be sparse, unlike that of a ``view``.
    """
    return value[...] if torch.is_grad_enabled() and value.requires_grad else value


def fork(value: torch.Tensor, uses: int) -> Bundle:
    """Return one alias per use of a value; their gradients add from the last use to the first, on any cut.

    Under a transform and in compiled stages they are the value itself, since those do not support custom functions; so
    they are for a result of several tensors, whose elements are picked one by one.
    """
    if not isinstance(value, torch.Tensor) or torch.compiler.is_dynamo_compiling():
        return (value,) * uses
    if uses > 1 and torch.is_grad_enabled() and value.requires_grad and not is_transformed():
        return _Fork.apply(value, uses)
    return (value,) * uses


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, uses: int) -> Bundle:
        ctx.set_materialize_grads(False)
        ctx.device = value.device
        return tuple(value.detach() for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        present = [gradient.to(ctx.device) for gradient in reversed(gradients) if gradient is not None]
        if len(present) > 2 and not (torch.is_grad_enabled() or any(gradient.is_sparse for gradient in present)):
            present = [reduce(torch.Tensor.add_, present[1:], present[0].clone())]
        return reduce(plus, present) if present else None, None


def plus(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, dense or sparse; torch supports a sparse one only as the second operand."""
    return other + first if first.is_sparse and not other.is_sparse else first + other


def draw(key: CellContext, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a random operation with its numbers on the tape, else with a seed per step, node and microbatch.

    With a seed generators stay untouched. They belong to the process, so lanes that run at the same time draw one
    after the other.
    """
    tape = key.state.tape
    if tape is not None and tape.holds(name):
        return tape.run(name, key.microbatch, function, args, kwargs)
    call = key.state.seed
    microbatch = key.microbatch + (key.state.before if key.microbatch >= 0 else 0)
    seed = zlib.crc32(f"{call}/{name}/{microbatch}".encode()) ^ (call & 0x7FFFFFFF) << 32
    with DRAWING:
        before = [(generator, generator.get_state()) for generator in generators()]
        try:
            for generator, _ in before:
                generator.manual_seed(seed)
            return function(*args, **kwargs)
        finally:
            for generator, state in before:
                generator.set_state(state)


has_side_effect(record)
