"""One operation of a graph by itself, on values in which one row is kept and its neighbours are made up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO, LENGTH, TensorInfo
from autosplit.trace.inputs.structure import flatten_output, tensors_in

Values = dict[fx.Node, Any]
KINDS = ("other rows", "equal rows", "random", "far", "all random", "other rows", "all random", "far")
"""What the neighbours are, draw by draw; in ``all random`` the kept row is drawn too."""
FEW_KINDS = ("other rows", "equal rows", "all random")
_FAR = 100.0
_DRAWN = 65_537
"""Random values that are drawn; larger tensors repeat them. A prime, so that rows do not repeat."""


@dataclass(frozen=True)
class Layout:
    """The row of each entry along a tensor's batch dimension."""

    dim: int
    rows: tuple[int, ...]

    @classmethod
    def stack(cls, dim: int, size: int, rows: int) -> Layout:
        """Return the layout of a stack of ``rows`` rows."""
        return cls(dim, tuple(entry * rows // size for entry in range(size)))

    @classmethod
    def of(cls, numbers: torch.Tensor, info: TensorInfo, rows: int) -> Layout | None:
        """Return the layout of a tensor of row numbers; None where rows do not lie along the batch dimension alone."""
        dim = info.batch_dim
        if dim is None:
            return None
        if not numbers.numel():
            return cls.stack(dim, numbers.shape[dim], rows)
        others = [d for d in range(numbers.dim()) if d != dim]
        least, most = (numbers.amin(others), numbers.amax(others)) if others else (numbers, numbers)
        found = tuple(least.tolist())
        evenly = all(found.count(row) * rows == len(found) for row in range(rows))
        return cls(dim, found) if evenly and torch.equal(least, most) else None

    @property
    def is_stack(self) -> bool:
        """Whether the rows follow each other."""
        return all(a <= b for a, b in zip(self.rows, self.rows[1:], strict=False))

    def entries(self, row: int) -> torch.Tensor:
        """Return the positions along the batch dimension that belong to a row."""
        return torch.tensor([entry for entry, owner in enumerate(self.rows) if owner == row])

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return row numbers in the shape of a tensor."""
        shape = [1] * tensor.dim()
        shape[self.dim] = len(self.rows)
        return torch.tensor(self.rows, dtype=torch.int16).reshape(shape).expand(tensor.shape)

    def after(self, dim: int, size: int) -> Layout | None:
        """Return the layout of a result with this batch dimension, computed entry by entry; None for another size."""
        if size % len(self.rows):
            return None
        return Layout(dim, tuple(row for row in self.rows for _ in range(size // len(self.rows))))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a node's value, in the order of its `TensorInfo`."""
    return tensors_in(flatten_output(value)[0])


def result_of(node: fx.Node, run: fx.Interpreter, values: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    """Run a node on copies of its operands, or of ``values`` in their place; return what it makes or changes."""
    given = {n: copied(values.get(n, run.env[n])) if INFO in n.meta else run.env[n] for n in node.all_input_nodes}
    made = call_with(node, run, given)
    return tensors_of(made) if node.meta[INFO].tensors else [t for n in changed_by(node) for t in tensors_of(given[n])]


def call_with(node: fx.Node, run: fx.Interpreter, given: Mapping[fx.Node, Any]) -> Any:
    """Run a node on the given operands; what it draws is drawn from one seed."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
    with contextlib.ExitStack() as stack:
        if node.meta[INFO].random:
            stack.enter_context(random_state())
            torch.manual_seed(0)
        return getattr(run, node.op)(node.target, args, kwargs)


def size_at(node: fx.Node, run: fx.Interpreter, rows: int) -> Any:
    """Evaluate a size at a number of rows."""
    if node.op == "placeholder":
        return run.env[node] if LENGTH in node.meta else rows
    if node.op != "call_function":
        return run.env[node]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: size_at(n, run, rows))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def changed_by(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose storage some operation changes."""
    return [n for n in node.all_input_nodes if INFO in n.meta and n.meta[INFO].mutated]


def with_neighbours(
    value: Any, layouts: Sequence[Layout | None], rows: int, *, kept: int, kind: str, generator: torch.Generator
) -> Any:
    """Return a value in which all rows but one are made up; see `KINDS`."""
    sources = [kept] * rows if kind == "equal rows" else torch.randint(rows, (rows,), generator=generator).tolist()
    sources[kept] = kept

    def made_up(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        if kind in ("equal rows", "other rows") or tensor.is_complex():
            return _from_rows(tensor, layout, sources)
        made = tensor.clone().copy_(_random(tensor, generator, _FAR if kind == "far" else 1.0))
        at = layout.entries(kept)
        return made.index_copy_(layout.dim, at, tensor.index_select(layout.dim, at))

    return _mapped(value, layouts, made_up)


def with_random_rows(value: Any, layouts: Sequence[Layout | None], generator: torch.Generator) -> Any:
    """Return a value in which all rows are random; complex ones stay."""

    def made_up(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return tensor.clone() if tensor.is_complex() else tensor.clone().copy_(_random(tensor, generator))

    return _mapped(value, layouts, made_up)


def shuffled(value: Any, layouts: Sequence[Layout | None], rows: int, generator: torch.Generator) -> Any:
    """Return a value in which every row is some row of the value."""
    sources = torch.randint(rows, (rows,), generator=generator).tolist()
    return _mapped(value, layouts, lambda tensor, layout: _from_rows(tensor, layout, sources))


def _mapped(value: Any, layouts: Sequence[Layout | None], made_up: Any) -> Any:
    flat, rebuild = flatten_output(value)
    rest = iter(layouts)

    def one(leaf: Any) -> Any:
        layout = next(rest, None) if isinstance(leaf, torch.Tensor) else None
        return leaf if layout is None else made_up(leaf.detach(), layout)

    return rebuild([one(leaf) for leaf in flat])


def _from_rows(tensor: torch.Tensor, layout: Layout, sources: Sequence[int]) -> torch.Tensor:
    made = tensor.clone()
    for row, source in enumerate(sources):
        made.index_copy_(layout.dim, layout.entries(row), tensor.index_select(layout.dim, layout.entries(source)))
    return made


def _random(tensor: torch.Tensor, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Return random values: integers are some of the tensor's own, as most are indices."""
    if not tensor.is_floating_point():
        flat = tensor.reshape(-1)
        if tensor.dtype == torch.bool:
            return torch.randint(2, tensor.shape, generator=generator).bool()
        return flat[torch.randint(max(1, flat.numel()), tensor.shape, generator=generator)]
    low, high = _range(tensor)
    if scale != 1.0 or low == high:
        reach = scale * max(abs(low), abs(high), 1.0)
        low, high = -reach, reach
    drawn = torch.rand(min(_DRAWN, tensor.numel()), generator=generator, dtype=torch.float64).mul_(high - low).add_(low)
    repeated = drawn.to(tensor.dtype).repeat(tensor.numel() // max(1, len(drawn)) + 1)
    return repeated[: tensor.numel()].reshape(tensor.shape)


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    if not tensor.numel():
        return 0.0, 1.0
    low, high = map(float, tensor.aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    finite = tensor[tensor.isfinite()]
    return (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)


def copied(value: Any, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Return a value with copies of its tensors."""
    flat, rebuild = flatten_output(value)
    return rebuild([copy(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])


def from_sources(tensor: torch.Tensor, dim: int | None, rows: int, sources: Sequence[int]) -> torch.Tensor:
    """Return a stack of the given rows of a stack of rows; without a batch dimension, a copy."""
    if dim is None:
        return tensor.clone()
    size = tensor.shape[dim] // rows
    entries = [row * size + entry for row in sources for entry in range(size)]
    return tensor.index_select(dim, torch.tensor(entries, dtype=torch.long, device=tensor.device))
