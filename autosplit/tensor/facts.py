"""Runs a recorded graph once on fake tensors and notes, for every node, what it does to the axes of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from autosplit.profile.node_costs.fake import empty_value, fake_mode
from autosplit.profile.node_costs.flops import flat_tensors
from autosplit.tensor.axes import Axis
from autosplit.tensor.follow import Call, Follower, KernelsAsOne
from autosplit.tensor.local import lookup_of
from autosplit.tensor.rules import rules
from autosplit.trace.graph import INFO, ROWS, TracedGraph, TracedNode, lengths_in
from autosplit.trace.inputs.objects import storage_key
from autosplit.trace.recording.recording import apply_function
from autosplit.trace.rows.kinds import is_opaque

Operand = str
"""The name of an fx node; of a parameter or buffer a dot and its qualified name."""


def operand_of(node: fx.Node) -> Operand:
    """Return what names a node's value."""
    return f".{node.target}" if node.op == "get_attr" else node.name


@dataclass
class NodeFacts:
    """What a run showed of one node.

    Attributes:
        node: the node.
        operands: the tensors that it takes, by who gives them.
        results: its own.
        calls: the operations that it is made of.
        opaque: why it can only run whole; "" where it need not.
        in_place: it changes an operand, or another node changes its result.
    """

    node: fx.Node
    operands: dict[Operand, list[int]]
    results: list[int]
    calls: list[Call]
    opaque: str = ""
    in_place: bool = False

    @property
    def flops(self) -> int:
        """Operations on floating-point numbers of its forward."""
        return sum(call.flops for call in self.calls)


@dataclass
class Facts:
    """A graph's nodes, its values' axes and bytes."""

    rows: int
    lengths: Mapping[str, int] = field(default_factory=dict)
    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    dims: dict[int, list[Axis]] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    values: dict[Operand, Any] = field(default_factory=dict)
    outer: set[Axis] = field(default_factory=set)
    """The axes of the inputs."""
    varying: set[Axis] = field(default_factory=set)
    """The axes whose size differs between calls: the batch's, and lengths."""
    fake: Any = field(default_factory=fake_mode)
    """That of the tensors."""

    def ids(self, operand: Operand) -> list[int]:
        """Return the tensors that an operand is."""
        return [id(tensor) for tensor in flat_tensors(self.values[operand])]

    def bytes(self, operand: Operand) -> int:
        """Return the bytes of an operand's floating-point elements."""
        return sum(t.numel() * t.element_size() for t in flat_tensors(self.values[operand]))


class Run(fx.Interpreter):
    """The run: a graph's nodes one by one, values on fake tensors."""

    def __init__(self, traced: TracedGraph, graph: fx.Graph, *, rows: int) -> None:
        super().__init__(traced.root, graph=graph)
        self.extra_traceback = False
        infos = [n.meta[INFO].tensors[0] for n in graph.nodes if n.op == "placeholder" and INFO in n.meta]
        shapes = [info.shape_at(rows) for info in infos]
        self._lengths = lengths_in(traced.lengths, shapes)
        self.facts = Facts(rows, self._lengths)
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._follower = Follower(rules())
        first = next(traced.root.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device

    def whole(self) -> Facts:
        """Run all nodes and return what was found."""
        with self.facts.fake, torch.no_grad():
            for node in self.graph.nodes:
                self.env[node] = self._value(node)
                if node.op != "output":
                    self.facts.values[operand_of(node)] = self.env[node]
        for tensor in self._follower.met:
            self.facts.dims[id(tensor)] = self._follower.dims(tensor)
            self.facts.tensors[id(tensor)] = tensor
        outer = [node for node in self.graph.nodes if node.op == "placeholder" and INFO in node.meta]
        self.facts.outer = {
            atom for node in outer for axis in self._follower.dims(self.env[node]) for atom in axis.atoms()
        }
        for node in self.graph.nodes:
            infos = node.meta[INFO].tensors if INFO in node.meta else ()
            for tensor, info in zip(flat_tensors(self.env[node]), infos, strict=False):
                for axis, size in zip(self._follower.dims(tensor), info.shape, strict=True):
                    if (size.per_row or size.number is not None) and axis.found().is_atom:
                        self.facts.varying.add(axis.found())
        return self.facts

    def _value(self, node: fx.Node) -> Any:
        info: TracedNode | None = node.meta.get(INFO)
        if node.op == "placeholder":
            if info is None:
                return self.facts.rows if node.target == ROWS else self._lengths[str(node.target)]
            return self._recorded(node)
        if node.op == "output":
            return None
        if node.op == "get_attr":
            return self._twin(self.fetch_attr(str(node.target)))
        if info is None:
            return getattr(self, node.op)(node.target, *self.fetch_args_kwargs_from_env(node))
        return self._computed(node, info)

    def _recorded(self, node: fx.Node) -> Any:
        """Return new tensors like those that were recorded."""
        with self._device:
            return self._entered(empty_value(node, self.facts.rows, needs_grad=False))

    def _entered(self, value: Any) -> Any:
        for tensor in flat_tensors(value):
            self._follower.dims(tensor)
        return value

    def _twin(self, value: Any) -> Any:
        """Return a fake tensor of a parameter's, a buffer's or a constant's shape: one for each."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._twins:
            twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            self._twins[id(value)] = value, self._entered(twin)
        return self._twins[id(value)][1]

    def _computed(self, node: fx.Node, info: TracedNode) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        operands: dict[Operand, list[int]] = {}
        for operand in node.all_input_nodes:
            tensors = [*flat_tensors(self.env[operand])]
            if tensors:
                operands[operand_of(operand)] = [id(tensor) for tensor in tensors]
        state: dict[str, Tensor] = {}
        if node.op != "call_module" and not any(
            operand.name in self.facts.nodes  # parameters have a part in it
            or (operand.op == "get_attr" and isinstance(self.fetch_attr(str(operand.target)), nn.Parameter))
            for operand in node.all_input_nodes
        ):
            return self._recorded(node)
        if node.op == "call_module":
            module = self.fetch_attr(str(node.target))
            state = {n: self._twin(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
            for name, tensor in state.items():
                key = f".{node.target}.{name}"
                operands[key] = [id(tensor)]
                self.facts.values[key] = tensor
        follower = self._follower
        follower.calls, follower.changes_operands, opaque = [], False, self._why_opaque(node)
        taken = [*state.values(), *(t for n in node.all_input_nodes for t in flat_tensors(self.env[n]))]
        follower.shared = {storage_key(tensor) for tensor in taken}
        follower.rows_in_parts = lookup_of(node, self.module) is not None
        try:
            with follower, KernelsAsOne(follower):
                if node.op == "call_module":
                    result = functional_call(module, state, args, kwargs)
                else:
                    result = getattr(self, node.op)(node.target, args, kwargs)
        except Exception as error:  # whatever an operation raises on fake tensors: its results are as recorded
            opaque = f"it does not run on fake tensors ({type(error).__name__}: {error})"
            result = self._recorded(node)
        results = [id(tensor) for tensor in flat_tensors(self._entered(result))]
        in_place = follower.changes_operands or info.mutated or bool(info.writes)
        self.facts.nodes[node.name] = NodeFacts(node, operands, results, follower.calls, opaque, in_place)
        return result

    def _why_opaque(self, node: fx.Node) -> str:
        if node.target is apply_function:
            return "it has a backward of its own"
        if node.op == "call_module" and isinstance(self.fetch_attr(str(node.target)), nn.RNNBase):
            return "a recurrent layer holds its parameters a second time"
        return "its Python runs as one operation" if is_opaque(node, self.module) else ""
