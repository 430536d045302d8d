"""What the model's outputs are like in one step, before any of them is there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autosplit.runtime.step.step import Step
from autosplit.trace.graph import INFO, NodeClass, TensorInfo


@dataclass(frozen=True)
class Shape:
    """The sizes of one output, and which of its dimensions is the batch."""

    sizes: tuple[int, ...]
    batch_dim: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def without(self, dim: int) -> tuple[int, ...]:
        """Return the sizes without one dimension."""
        return self.sizes[:dim] + self.sizes[dim + 1 :]


class Outputs:
    """The outputs of one step."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.nodes: tuple[Any, ...] = step.lowered.outputs
        """The flat outputs: fx nodes, and constants as they are."""

    def by_rows(self, wants: frozenset[str] | None) -> bool:
        """Tell whether every output that is used is known per microbatch: it is the batch's rows, or a constant."""
        used = [n for n in self.nodes if isinstance(n, fx.Node) and (wants is None or n.name in wants)]
        return self.step.lowered.epilogue is None and not any(
            INFO not in node.meta or node.meta[INFO].node_class is not NodeClass.MICRO for node in used
        )

    def shapes(self) -> list[Shape]:
        """Return the shapes of the outputs that have a batch."""
        dims = self.step.lowered.traced.batch_outputs
        pairs = zip(self.nodes, dims, strict=True)
        return [Shape(self._shape(node, self.step.rows), dim) for node, dim in pairs if dim is not None]

    def stand_in(self, microbatch: int | None = None, *, zeros: bool = False) -> Any:
        """Return an output of the right shapes and dtypes for a microbatch, or for the whole batch (None).

        Its tensors have no values; with ``zeros`` they are zeros on the last stage's device, and take no memory.
        """
        return self.step.lowered.traced.unflatten(self.leaves(microbatch, zeros=zeros))

    def leaves(self, microbatch: int | None = None, *, zeros: bool = False) -> list[Any]:
        """Return the flat leaves of :meth:`stand_in`."""
        rows = self.step.rows if microbatch is None else self.step.sizes[microbatch]
        found: list[Any] = []
        for node in self.nodes:
            if not (isinstance(node, fx.Node) and INFO in node.meta):
                found.append(node)
                continue
            shape, dtype = self._shape(node, rows), _info(node).dtype
            if zeros:
                found.append(torch.zeros((), dtype=dtype, device=self.step.lanes[-2].device).expand(shape))
            else:
                found.append(torch.empty(shape, dtype=dtype, device="meta"))
        return found

    def _shape(self, node: fx.Node, rows: int) -> tuple[int, ...]:
        return _info(node).shape_at(rows, self.step.lengths)


def _info(node: fx.Node) -> TensorInfo:
    tensor: TensorInfo = node.meta[INFO].tensors[0]
    return tensor
