"""Do rows influence each other's gradients? Asked of operations whose backward is the model's own.

    whole     rows 0 1 2 3      one backward
    pieces    0 │ 1 │ 2 │ 3     one backward each: side by side the same, and added up for operands without rows

A backward may do what a forward does not show: take a mean off the gradients, clip them by their norm over the batch,
divide a weight's gradient by the number of rows. It is asked with small gradients and with large ones: clipping hides.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx, nn

from autosplit.compare import same_reordered
from autosplit.errors import ForeignSuppressed
from autosplit.trace.graph import INFO
from autosplit.trace.recording.recording import apply_function
from autosplit.trace.rows.kinds import function_of
from autosplit.trace.rows.layout import from_sources
from autosplit.trace.rows.row_values import rows_of, tensors_of
from autosplit.trace.scope import is_layer

_SCALES = (1.0, 1e4)
Operand = fx.Node | str
Gradients = dict[Operand, torch.Tensor | None]


def has_own_backward(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node's backward may be the model's own: a custom autograd function, an opaque module, a hook."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return not is_layer(module) or bool(module._backward_hooks or module._backward_pre_hooks)
    return node.op == "call_function" and function_of(node, root) is apply_function


class BackwardProbe:
    """One operation with the values that it has in a run; it runs on no fewer than ``kept`` rows."""

    def __init__(self, node: fx.Node, run: fx.Interpreter, *, rows: int, kept: int) -> None:
        self.node, self.run, self.rows = node, run, rows
        starts = range(0, rows - kept + 1, kept)
        self.cuts = [*starts[: max(1, rows // kept)], rows]
        self.dims = [tensor.batch_dim for tensor in node.meta[INFO].tensors]
        self.weights: list[torch.Tensor] = []

    def mixes(self) -> bool:
        """Tell whether the gradients of the whole differ from those of the pieces, or cannot be compared."""
        with ForeignSuppressed(), torch.enable_grad():
            return any(not self._adds_up(scale) for scale in _SCALES)
        return True  # a backward that fails on some rows alone is no backward by rows

    def _adds_up(self, scale: float) -> bool:
        self.weights = []
        whole = self._gradients(range(self.rows), scale)
        pieces = [self._gradients(range(*ends), scale) for ends in itertools.pairwise(self.cuts)]
        for operand, gradient in whole.items():
            parts = [piece[operand] for piece in pieces]
            present = [piece for piece in parts if piece is not None]
            if gradient is None or not present:
                if gradient is not None or present:
                    return False
                continue
            dim = _batch_dim(operand)
            if dim is not None and len(present) < len(parts):  # an expert that no row of a piece takes has no gradient
                return False
            together = torch.stack(present).sum(0, dtype=gradient.dtype) if dim is None else torch.cat(present, dim)
            if not same_reordered(gradient, together):
                return False
        return True

    def _gradients(self, rows: range, scale: float) -> Gradients:
        """Return the gradients of all operands and parameters for some of the rows."""
        leaves: dict[Operand, torch.Tensor] = {}
        operands = {n: self._operand(n, rows, leaves) for n in self.node.all_input_nodes}
        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), operands.__getitem__)
        function = function_of(self.node, self.run.module)
        if isinstance(function, nn.Module):
            parameters = function.named_parameters()
            leaves |= {name: p for name, p in parameters if p.requires_grad and not p._backward_hooks}
        result = getattr(self.run, self.node.op)(self.node.target, args, kwargs)
        tensors = tensors_of(result)
        if not self.weights:
            generator = torch.Generator().manual_seed(0)
            self.weights = [torch.randn(t.shape, generator=generator) * scale for t in tensors]
        weights = [from_sources(w, d, self.rows, rows) for w, d in zip(self.weights, self.dims, strict=True)]
        roots = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
        if not roots or not leaves:
            return dict.fromkeys(leaves)
        gradients = torch.autograd.grad(
            [tensors[i] for i in roots],
            list(leaves.values()),
            [weights[i].to(tensors[i]) for i in roots],
            allow_unused=True,
        )
        return dict(zip(leaves, gradients, strict=True))

    def _operand(self, operand: fx.Node, rows: range, leaves: dict[Operand, torch.Tensor]) -> Any:
        value = rows_of(operand, self.run, self.rows, rows)
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        leaves[operand] = value.detach().clone().requires_grad_()
        return leaves[operand].clone()  # the operation may change what it is given


def _batch_dim(operand: Operand) -> int | None:
    if isinstance(operand, str) or INFO not in operand.meta or len(operand.meta[INFO].tensors) != 1:
        return None
    dim: int | None = operand.meta[INFO].tensors[0].batch_dim
    return dim
