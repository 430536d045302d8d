"""A recorded forward: an fx graph whose nodes know their name, class, sizes and state.

The graph is the model's own torch-level calls in the order in which they ran:

    placeholders     ``rows`` (the number of batch rows, an int), ``dim0``, ... (lengths that differ from call to call,
                     ints, marked by ``LENGTH`` in their meta), then one per input tensor
    get_attr         a parameter, buffer or constant, by its qualified name in the model
    call_module      a leaf module (``torch.nn`` layers), by its qualified name
    call_function    a torch function; ``operator.getitem`` also projects one tensor out of a structured result
    call_method      a ``torch.Tensor`` method
    output           the tuple of the model's flat outputs

Python numbers that depend on the batch are ``operator`` expressions of ``rows`` and the lengths: "sizes". Nodes that
compute a tensor (everything but ``rows``, lengths, sizes, get_attr and output) carry a :class:`TracedNode` in their
meta, under ``INFO``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace.inputs.objects import Layout
from autosplit.trace.recording.random_watch import Draw

INFO = "autosplit"
LENGTH = "autosplit_length"
ROWS = "rows"
"""The name of the number of batch rows among the sizes; lengths are ``dim0``, ``dim1``, ..."""
LEAST = 2
"""The smallest size that a symbol stands for: a size of 1 broadcasts, and Python and torch ask for it all the time."""


# -- numbers that depend on sizes of the inputs ------------------------------------------------------------------------
@dataclass(frozen=True)
class Symbol:
    """A size of the inputs, by its name."""

    name: str


@dataclass(frozen=True)
class Formula:
    """An ``operator`` function, or one of ``math`` or the builtins, of numbers, symbols and other formulas."""

    function: Callable[..., Any]
    operands: tuple[Formula | Symbol | float, ...]


Number = Formula | Symbol | float


def evaluate(number: Number, sizes: Mapping[str, int]) -> Any:
    """Return the value of a number at given sizes."""
    if isinstance(number, Symbol):
        return sizes[number.name]
    if isinstance(number, Formula):
        return number.function(*(evaluate(operand, sizes) for operand in number.operands))
    return number


def affine(per_row: float, constant: float) -> Number:
    """Return the number ``per_row * rows + constant``."""
    if not per_row:
        return constant
    number = Symbol(ROWS) if per_row == 1 else Formula(operator.mul, (Symbol(ROWS), per_row))
    return Formula(operator.add, (number, constant)) if constant else number


def symbols_in(number: Number) -> set[str]:
    """Return the names of the sizes that a number depends on."""
    if isinstance(number, Symbol):
        return {number.name}
    if isinstance(number, Formula):
        return {name for operand in number.operands for name in symbols_in(operand)}
    return set()


@dataclass(frozen=True)
class Length:
    """A dimension of the inputs, other than the batch, that one recording serves at many sizes.

    Attributes:
        name: the symbol's name.
        places: (position among the input tensors, dimension); all have the same size in a call.
    """

    name: str
    places: tuple[tuple[int, int], ...]


def lengths_in(lengths: Sequence[Length], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the lengths in a call from its input tensors' shapes, in the order of the graph's placeholders."""
    return {length.name: shapes[position][dim] for length in lengths for position, dim in length.places[:1]}


# -- nodes and graphs --------------------------------------------------------------------------------------------------
class NodeClass(str, Enum):
    """How often a node runs in one step of the pipeline."""

    SHARED = "shared"
    """No dependence on the batch: once per step, before the microbatches."""
    MICRO = "micro"
    """Rows are independent: once per microbatch."""
    FULL = "full"
    """Mixes rows: once per step, on merged values."""


@dataclass(frozen=True)
class Size:
    """A size that is affine in the number of batch rows: ``per_row * rows + constant``.

    Where lengths of the inputs are symbols, both are those at the lengths that were recorded first, and ``number`` is
    the size at any.
    """

    per_row: int
    constant: int
    number: Number | None = None

    def at(self, rows: int, lengths: Mapping[str, int] = MappingProxyType({})) -> int:
        """Return the size for a batch of ``rows`` rows, at the recorded lengths when none are given."""
        if self.number is not None and lengths:
            return int(evaluate(self.number, {**lengths, ROWS: rows}))
        return self.per_row * rows + self.constant


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype, batch dimension and layout of one tensor."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    layout: Layout = None
    """The order of its dimensions in memory; see :func:`autosplit.trace.inputs.objects.layout_of`."""

    @property
    def differentiable(self) -> bool:
        """Whether gradients can flow through the tensor, by its dtype."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def varying_dims(self) -> tuple[int, ...]:
        """The dimensions whose size depends on the batch."""
        return tuple(dim for dim, size in enumerate(self.shape) if size.per_row)

    @property
    def batch_dim(self) -> int | None:
        """The one dimension that is a multiple of the batch, or None when there is no such dimension."""
        dims = self.varying_dims
        return dims[0] if len(dims) == 1 and self.shape[dims[0]].constant == 0 else None

    def shape_at(self, rows: int, lengths: Mapping[str, int] = MappingProxyType({})) -> tuple[int, ...]:
        """Return the shape for a batch of ``rows`` rows, at the recorded lengths when none are given."""
        return tuple(size.at(rows, lengths) for size in self.shape)

    def bytes_at(self, rows: int) -> int:
        """Return the number of bytes of the tensor's elements for a batch of ``rows`` rows."""
        return math.prod(self.shape_at(rows)) * self.dtype.itemsize


@dataclass(frozen=True)
class TracedNode:
    """What the recording knows about one tensor-computing node."""

    name: str
    """Stable name: ``module.path#call/op_k`` (a leaf module: ``module.path#call``; an input: ``input/name``)."""
    module: str
    """Qualified name of the module in whose forward the node ran; the leaf itself for ``call_module``."""
    node_class: NodeClass
    tensors: tuple[TensorInfo, ...]
    """The tensors that the node computes, flat; one for most nodes."""
    reads: tuple[str, ...] = ()
    """Qualified names of the parameters and buffers that the node reads (a leaf module: all of its own)."""
    writes: tuple[str, ...] = ()
    """Qualified names of the buffers that the node changes."""
    rewritten: tuple[str, ...] = ()
    """Qualified names of the buffers that the node reads or changes and that some node of the forward changes."""
    random: bool = False
    """The node draws random numbers."""
    draws: tuple[Draw, ...] | None = ()
    """Its random draws, in order, with sizes as expressions; None if they are not known in advance."""
    part: tuple[int, tuple[range, ...]] | None = None
    """A dimension of what it draws, and the elements along it that are drawn here; None: all."""
    mutated: bool = False
    """Some node changes the storage of this node's result in place."""
    source: str = ""
    """Where the model's code calls the operation: ``file:line``; "" when not known."""
    whole: str = ""
    """Why the node must run once per step whatever its values say, or "": the whole batch at once, or nothing."""
    colocation_group: int | None = None
    """Nodes of one group must share a stage."""


def size_at(node: fx.Node, rows: int, known: Callable[[fx.Node], Any]) -> Any:
    """Evaluate a size at a number of rows; ``known`` returns lengths, and what is no expression of these."""
    if node.op != "call_function":
        return rows if node.op == "placeholder" and LENGTH not in node.meta else known(node)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: size_at(n, rows, known))
    assert callable(node.target)
    return node.target(*args, **kwargs)


@dataclass(frozen=True)
class InputInfo:
    """One input tensor of the model."""

    name: str
    index: int
    """Position among the flattened inputs."""
    batch_dim: int | None


@dataclass(frozen=True)
class TracedGraph:
    """One recording of a model's forward, right for every batch size.

    Attributes:
        graph: the fx graph described in the module's docstring.
        root: a bare module that shares the model's own ``_modules``, ``_parameters`` and ``_buffers`` and owns the
            constants; give it to ``fx.Interpreter(root, graph=graph)``.
        inputs: the input tensors, in the order of the placeholders after ``rows`` and the lengths.
        order: pairs of fx node names ``(before, after)`` that must keep their order although no value flows between
            them (mutation of a storage or a buffer).
        tied: qualified names of the parameters that are used more than once, each a value with one home.
        homes: stages that parameters belong to already, by name; what a later stage uses is a value, too.
        min_rows: the smallest microbatch for which the recording holds (2 when one row behaves differently).
        unflatten: rebuilds the model's output from the flat outputs.
        batch_outputs: for each flat output its batch dimension, or None (shared, full, or not a tensor).
        lengths: dimensions of the inputs for whose size the graph has a placeholder.
        changed: where the forward changes Python state; see :mod:`autosplit.trace.borrowed.side_effects`.
        kept: how many of the last flat outputs are tensors that it leaves there.
        asks_grad_mode: where the forward asks whether gradients are on, which they were while it was recorded; or "".
        checkpoints: whether the forward runs anything under `torch.utils.checkpoint`.
    """

    graph: fx.Graph
    root: nn.Module
    inputs: tuple[InputInfo, ...]
    order: tuple[tuple[str, str], ...]
    tied: tuple[str, ...]
    min_rows: int
    unflatten: Callable[[list[Any]], Any] = field(repr=False)
    batch_outputs: tuple[int | None, ...] = ()
    lengths: tuple[Length, ...] = ()
    changed: frozenset[tuple[str, str]] = frozenset()
    kept: int = 0
    asks_grad_mode: str = ""
    checkpoints: bool = False
    homes: Mapping[str, int] = field(default_factory=dict)

    def compute_nodes(self) -> Iterator[tuple[fx.Node, TracedNode]]:
        """Yield the tensor-computing nodes in model order, inputs excluded."""
        for node in self.graph.nodes:
            if node.op != "placeholder" and INFO in node.meta:
                yield node, node.meta[INFO]

    @cached_property
    def written(self) -> frozenset[str]:
        """The names of the buffers, and tables with ``max_norm``, that the forward changes."""
        return frozenset(name for _, info in self.compute_nodes() for name in info.writes)

    def by_name(self) -> dict[str, fx.Node]:
        """Map stable names to fx nodes, inputs included."""
        return {node.meta[INFO].name: node for node in self.graph.nodes if INFO in node.meta}
