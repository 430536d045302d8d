"""One operation of a graph by itself, on values in which one row is kept and its neighbours are made up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from autosplit.trace.graph import INFO
from autosplit.trace.state import random_state
from autosplit.trace.structure import flatten_output, tensors_in

Values = dict[fx.Node, Any]
KINDS = ("other rows", "equal rows", "random", "far", "random", "other rows", "random", "far")
"""What the neighbours are, draw by draw."""
FEW_KINDS = ("other rows", "equal rows")
_FAR = 100.0
_DRAWN = 65_537
"""Random values that are drawn; larger tensors repeat them. A prime, so that rows do not repeat."""


class Entries(Protocol):
    """Where rows lie along a tensor's batch dimension."""

    @property
    def dim(self) -> int:
        """The batch dimension."""

    def entries(self, row: int) -> torch.Tensor:
        """Return the positions that belong to a row."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a node's value, in the order of its `TensorInfo`."""
    return tensors_in(flatten_output(value)[0])


def result_of(node: fx.Node, run: fx.Interpreter, values: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    """Run a node on copies of its operands, or of ``values`` in their place; return what it makes or changes."""
    given = {n: run.env[n] if INFO not in n.meta else _copy(values.get(n, run.env[n])) for n in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
    with contextlib.ExitStack() as stack:
        if node.meta[INFO].random:
            stack.enter_context(random_state())
            torch.manual_seed(0)
        made = getattr(run, node.op)(node.target, args, kwargs)
    return tensors_of(made) if node.meta[INFO].tensors else [t for n in changed_by(node) for t in tensors_of(given[n])]


def changed_by(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose storage some operation changes."""
    return [n for n in node.all_input_nodes if INFO in n.meta and n.meta[INFO].mutated]


def with_neighbours(
    value: Any, layouts: Sequence[Entries | None], rows: int, *, kept: int, kind: str, generator: torch.Generator
) -> Any:
    """Return a value in which all rows but one are made up; see `KINDS`."""
    sources = [kept] * rows if kind == "equal rows" else torch.randint(rows, (rows,), generator=generator).tolist()
    sources[kept] = kept

    def made_up(tensor: torch.Tensor, layout: Entries) -> torch.Tensor:
        if kind in ("equal rows", "other rows") or tensor.is_complex():
            return _from_rows(tensor, layout, sources)
        made = tensor.clone().copy_(_random(tensor, generator, _FAR if kind == "far" else 1.0))
        at = layout.entries(kept)
        return made.index_copy_(layout.dim, at, tensor.index_select(layout.dim, at))

    return _mapped(value, layouts, made_up)


def shuffled(value: Any, layouts: Sequence[Entries | None], rows: int, generator: torch.Generator) -> Any:
    """Return a value in which every row is some row of the value."""
    sources = torch.randint(rows, (rows,), generator=generator).tolist()
    return _mapped(value, layouts, lambda tensor, layout: _from_rows(tensor, layout, sources))


def _mapped(value: Any, layouts: Sequence[Entries | None], made_up: Any) -> Any:
    flat, rebuild = flatten_output(value)
    rest = iter(layouts)

    def one(leaf: Any) -> Any:
        layout = next(rest, None) if isinstance(leaf, torch.Tensor) else None
        return leaf if layout is None else made_up(leaf.detach(), layout)

    return rebuild([one(leaf) for leaf in flat])


def _from_rows(tensor: torch.Tensor, layout: Entries, sources: Sequence[int]) -> torch.Tensor:
    made = tensor.clone()
    for row, source in enumerate(sources):
        made.index_copy_(layout.dim, layout.entries(row), tensor.index_select(layout.dim, layout.entries(source)))
    return made


def _random(tensor: torch.Tensor, generator: torch.Generator, scale: float) -> torch.Tensor:
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


def _copy(value: Any) -> Any:
    flat, rebuild = flatten_output(value)
    return rebuild([leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
