"""The words of the pipelined program: split, transfer, record, wait, merge, and what keeps the numbers the same.

A *bundle* is a tuple of tensors that travel together: everything that one stage sends to one other stage for one
microbatch.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.node import has_side_effect

from autosplit.runtime.lanes import Lane

Bundle = tuple[torch.Tensor, ...]
OUT = "out"
"""The name, among a stage's bundles, of the one for the epilogue and the caller."""
_DRAWING = threading.Lock()
"""Held while a random operation has the process's default generators for itself."""


class Key(NamedTuple):
    """What the random draws of one cell are seeded by."""

    seed: int
    microbatch: int


def sizes_of(rows: int, chunks: int, min_rows: int) -> tuple[int, ...]:
    """Return the rows of each microbatch, as ``torch.tensor_split`` cuts: at most ``chunks``, each of ``min_rows``."""
    count = max(1, min(chunks, rows // min_rows))
    base, extra = divmod(rows, count)
    return tuple(base + (i < extra) for i in range(count))


def split(
    bundle: Bundle, sizes: Sequence[int], dims: Sequence[int], lane: Lane, changed: Sequence[bool] = ()
) -> tuple[Bundle, ...]:
    """Cut every tensor into microbatches along its batch dimension and place them on a lane's device.

    Where the model changes an input in place (``changed``), each microbatch counts its versions itself: it is a copy
    when a gradient is wanted, else it writes to the caller's tensor, as the model would.
    """
    parts = []
    for tensor, dim, private in zip(bundle, dims, changed or (False,) * len(dims), strict=True):
        pieces = rows_along(tensor, sizes, dim)
        if private:
            pieces = [piece.clone() if piece.requires_grad else piece.data for piece in pieces]
        parts.append([_to(piece, lane) for piece in pieces])
    return tuple(zip(*parts, strict=True))


def rows_along(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    """Cut a tensor into microbatches; they are contiguous where it is, and may be changed in place."""
    if len(sizes) == 1:
        return [tensor]
    factor = tensor.shape[dim] // sum(sizes)
    starts = [factor * sum(sizes[:m]) for m in range(len(sizes))]
    pieces = [tensor.narrow(dim, start, factor * size) for start, size in zip(starts, sizes, strict=True)]
    return [piece.contiguous() for piece in pieces] if dim and tensor.is_contiguous() else pieces


def merge(bundles: Sequence[Bundle], dims: Sequence[int]) -> Bundle:
    """Join the microbatches of every tensor of a bundle along its batch dimension."""
    if len(bundles) == 1:
        return tuple(bundles[0])
    return tuple(torch.cat(pieces, dim) for pieces, dim in zip(zip(*bundles, strict=True), dims, strict=True))


def transfer(bundle: Bundle, source: Lane, target: Lane) -> Bundle:
    """Copy a bundle from one lane's device to another's; between lanes of one device it stays where it is."""
    if source.device == target.device:
        return bundle
    return tuple(_to(tensor, target) for tensor in bundle)


def _to(tensor: torch.Tensor, lane: Lane) -> torch.Tensor:
    return tensor if tensor.device == lane.device else tensor.to(lane.device, non_blocking=True)


def record(lane: Lane) -> Any:
    """Return an event for the work that the lane was given so far."""
    return lane.record()


def wait(lane: Lane, event: Any) -> None:
    """Let the lane's later work wait for another lane's event."""
    lane.wait(event)


def pick(bundle: Sequence[Any], position: int) -> Any:
    """Return one entry of a bundle."""
    return bundle[position]


def alias(value: torch.Tensor) -> torch.Tensor:
    """Return a view of its own for one use of a value that is used several times.

    What one use sends back is summed in its view before it meets the other uses' gradients, so that the order of
    additions, and with it every bit, is the same wherever the cut falls.
    """
    return value.view_as(value) if torch.is_grad_enabled() and value.requires_grad else value


def fork(value: torch.Tensor, uses: int) -> Bundle:
    """Return one alias per use of a value; their gradients add from the last use to the first, on any cut."""
    if uses > 1 and torch.is_grad_enabled() and value.requires_grad:
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
        total: torch.Tensor | None = None
        for gradient in reversed(gradients):
            if gradient is not None:
                gradient = gradient.to(ctx.device)
                total = gradient if total is None else total + gradient
        return total, None


def draw(key: Key, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a random operation with a seed of its own per step, node and microbatch; generators stay untouched.

    Generators belong to the process, so lanes that run at the same time draw one after the other.
    """
    seed = zlib.crc32(f"{key.seed}/{name}/{key.microbatch}".encode()) ^ (key.seed & 0x7FFFFFFF) << 32
    devices = {leaf.device for leaf in args if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"}
    generators = [torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)]
    with _DRAWING:
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            return function(*args, **kwargs)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


for _function in (record, wait):
    has_side_effect(_function)
