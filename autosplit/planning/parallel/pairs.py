"""Tensor-parallel shares by a simple rule: pairs of products with a parameter, found from the graph.

```
    residual ─► column product ─► what keeps heads or features apart ─► row product ─► residual
       R             R → S                        S → S                    S → R            R
```

R: every rank has the value, or where rows are sequences its part of the positions (sequence parallelism, Korthikanti et
al. 2022, arXiv 2205.05198). S: a rank has its part of the features or heads. A product whose result would reach an
operation that mixes features stays replicated. An embedding and the product in front of a cross entropy are sharded
over the words. Column products gather positions, row products scatter them; without sequences both sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autosplit.errors import InputError
from autosplit.planning.profiled.apply import DataflowIndex
from autosplit.profile.shares import Collective, NodeShare, TensorShares
from autosplit.profile.types import NodeProfile, Profile
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode

_MIXES = frozenset(
    "_softmax _log_softmax topk sort mean sum var var_mean native_layer_norm _fused_rms_norm cumsum argmax max min "
    "amax amin logsumexp linalg_vector_norm".split()
)
"""Operations over the last dimension; they mix features unless these are a head's own."""


@dataclass(frozen=True)
class Pairs:
    """The products that are sharded, by node, and what a degree has to divide.

    Attributes:
        columns, rows: the products of each kind.
        vocabulary: embeddings and the product in front of the loss.
        sharded: other nodes whose values are sharded by features or heads.
        sizes: what a degree has to divide, with what it is: heads, features.
    """

    columns: frozenset[fx.Node]
    rows: frozenset[fx.Node]
    vocabulary: frozenset[fx.Node]
    sharded: frozenset[fx.Node]
    sizes: tuple[tuple[str, int], ...]

    @property
    def divisors(self) -> tuple[int, ...]:
        """The degrees that divide all heads and features; 1 alone where there is no pair."""
        whole = math.gcd(*(size for _, size in self.sizes)) if self.rows else 1
        return tuple(degree for degree in range(1, whole + 1) if whole % degree == 0)

    def refusal(self, degree: int) -> str:
        """Return why so many ranks cannot share the products, and how many can."""
        if not self.rows:
            return f"tp={degree}: the model has no pair of products that tensor-parallel ranks could share; give tp=1"
        over = list(dict.fromkeys(f"{size} {what}" for what, size in self.sizes if size % degree))
        valid = ", ".join(map(str, self.divisors))
        return f"tp={degree} does not divide {' and '.join(over)}; degrees that divide all heads and features: {valid}"


def find_pairs(index: DataflowIndex, profile: Profile) -> Pairs:
    """Return the pairs of a recording; which node is a product, its profile says, at any number of rows."""
    blocked: frozenset[fx.Node] = frozenset()
    while True:
        found = _Pass(index, profile, blocked)
        if found.illegal <= blocked:
            return found.pairs()
        blocked |= found.illegal


class _Pass:
    """One pass in model order; products in ``blocked`` stay replicated, ``illegal`` are those that should."""

    def __init__(self, index: DataflowIndex, profile: Profile, blocked: frozenset[fx.Node]) -> None:
        self.index, self.profile, self.blocked = index, profile, blocked
        self.parameters = _Parameters(index.traced)
        self.origins: dict[fx.Node, frozenset[fx.Node]] = {}
        self.columns: set[fx.Node] = set()
        self.rows: set[fx.Node] = set()
        self.vocabulary: set[fx.Node] = set()
        self.illegal: set[fx.Node] = set()
        self.ended: set[fx.Node] = set()
        for node, info in index.micro:
            self._visit(node, info)
        outputs = next(iter(reversed(index.traced.graph.nodes))).all_input_nodes
        for node in {*outputs, *index.consumers}:
            ends = node in outputs or any(user not in self.origins for user in index.consumers.get(node, ()))
            if ends and node in self.origins and not self._ends_well(node):
                self.illegal |= self.origins[node]
        self.illegal |= self.columns - self.ended - self.illegal

    def _visit(self, node: fx.Node, info: TracedNode) -> None:
        costs = self.profile.nodes[info.name]
        sharded = [source for source in self.index.sources[node] if source in self.origins]
        origins = frozenset(origin for source in sharded for origin in self.origins[source])
        weight = max((len(shape) for shape in self.parameters.of(info).values()), default=0)
        if weight >= 2 and costs.forward_flops:
            if sharded:
                self.rows.add(node)
                self.ended |= origins
            elif node not in self.blocked:
                self.columns.add(node)
                self.origins[node] = frozenset((node,))
        elif weight >= 2 and not sharded:
            self.vocabulary.add(node)
        elif sharded and self._is_loss(costs):
            self.vocabulary |= origins
            self.ended |= origins
        elif sharded:
            self.origins[node] = origins
            if self._mixes(info, costs, sharded):
                self.illegal |= origins

    def _ends_well(self, node: fx.Node) -> bool:
        """Tell whether a sharded value may leave: rows take it, and the model's output goes to a loss."""
        users = self.index.consumers.get(node, ())
        to_rows = all(user in self.rows or user in self.origins or user in self.vocabulary for user in users)
        alone = node in self.columns or all(own in self.origins for own in self.index.sources[node])
        if not users and alone:
            self.vocabulary |= self.origins[node]
            self.ended |= self.origins[node]
            return True
        loss = all(self._is_loss(self.profile.nodes[user.meta[INFO].name]) for user in users if user not in self.rows)
        return to_rows or loss

    def _is_loss(self, costs: NodeProfile) -> bool:
        names = {operation.name for operation in costs.forward_operations}
        return "_log_softmax" in names and bool(names & {"nll_loss_forward", "nll_loss2d_forward"})

    def _mixes(self, info: TracedNode, costs: NodeProfile, sharded: Sequence[fx.Node]) -> bool:
        """Tell whether an operation mixes the features of a sharded value; a head's own may be mixed."""
        dims = min(len(source.meta[INFO].tensors[0].shape) for source in sharded)
        mixing = any(operation.name in _MIXES for operation in costs.forward_operations)
        return info.node_class is not NodeClass.MICRO or (mixing and dims < 4 and not costs.forward_flops)

    def pairs(self) -> Pairs:
        columns = frozenset(self.columns - self.blocked)
        sharded = frozenset(self.origins) - columns
        return Pairs(columns, frozenset(self.rows), frozenset(self.vocabulary), sharded, tuple(self._sizes(sharded)))

    def _sizes(self, sharded: frozenset[fx.Node]) -> Iterator[tuple[str, int]]:
        for node in self.rows:
            source = next(own for own in self.index.sources[node] if own in self.origins)
            yield "features", source.meta[INFO].tensors[0].shape[-1].constant
        for node in sharded:
            if not self.profile.nodes[node.meta[INFO].name].forward_flops:
                continue
            for source in self.index.sources[node]:
                info: TracedNode = source.meta[INFO]
                shape = info.tensors[0].shape if source in self.origins else ()
                if len(shape) >= 4:
                    yield "heads", shape[-3].constant
                elif len(shape) == 3:
                    yield "heads", shape[0].per_row


class _Parameters:
    """The parameters that nodes read, by the name that a profile has them under."""

    def __init__(self, traced: TracedGraph) -> None:
        self._named = dict(traced.root.named_parameters(remove_duplicate=False))
        self._first: dict[int, str] = {}
        for name, parameter in self._named.items():
            self._first.setdefault(id(parameter), name)

    def of(self, info: TracedNode) -> dict[str, torch.Size]:
        """Return the shapes of the parameters that a node reads, by name."""
        own = (self._named[name] for name in info.reads if name in self._named)
        return {self._first[id(parameter)]: parameter.shape for parameter in own}


def shares_of(pairs: Pairs, index: DataflowIndex, degree: int) -> TensorShares:
    """Return what a rank of so many has; words that the degree does not divide stay replicated."""
    if degree == 1:
        return TensorShares()
    if degree not in pairs.divisors:
        raise InputError(pairs.refusal(degree))
    part = 1 / degree
    nodes: dict[str, NodeShare] = {}
    gathered: set[str] = set()
    parameters = _Parameters(index.traced)
    whole = {node for node in pairs.vocabulary if _words(parameters.of(node.meta[INFO])) % degree}
    for node, info in index.micro:
        sequence = _has_sequence(info, degree)
        alone = part if sequence else 1.0
        source = next((own.meta[INFO].name for own in index.sources[node] if INFO in own.meta), info.name)
        if node in pairs.columns and node not in whole:
            entry = () if source in gathered else (source,)
            gathered.add(source)
            nodes[info.name] = NodeShare(part, part, *_entering(entry, sequence=sequence))
        elif (node in pairs.rows or node in pairs.vocabulary) and node not in whole:
            nodes[info.name] = NodeShare(part, alone, *_leaving(info.name, sequence=sequence))
        elif node in pairs.sharded and not any(own in whole for own in index.sources[node]):
            nodes[info.name] = NodeShare(part, part)
        else:
            nodes[info.name] = NodeShare(alone, alone)
    return TensorShares(degree, nodes, _states(pairs, index, parameters, whole, part))


def _entering(values: Sequence[str], *, sequence: bool) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Return the collectives in front of column products; in the backward positions are gathered once more."""
    if not sequence:
        return (), tuple(Collective("all_reduce", value) for value in values)
    gather = tuple(Collective("all_gather", value) for value in values)
    return gather, (*gather, *(Collective("reduce_scatter", value) for value in values))


def _leaving(value: str, *, sequence: bool) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Return the collectives behind a row product or an embedding."""
    if not sequence:
        return (Collective("all_reduce", value),), ()
    return (Collective("reduce_scatter", value),), (Collective("all_gather", value),)


def _has_sequence(info: TracedNode, degree: int) -> bool:
    """Tell whether a value has positions that a degree divides, in its second dimension."""
    shape = info.tensors[0].shape if info.tensors else ()
    return len(shape) >= 3 and not shape[1].per_row and shape[1].constant % degree == 0 and shape[1].constant > 1


def _words(shapes: Mapping[str, torch.Size]) -> int:
    return next((shape[0] for shape in shapes.values() if len(shape) >= 2), 1)


def _states(
    pairs: Pairs, index: DataflowIndex, parameters: _Parameters, whole: set[fx.Node], part: float
) -> dict[str, float]:
    """Return the parameters of sharded products; the bias of a row product is every rank's."""
    users: dict[str, list[bool]] = {}
    for node, info in index.micro:
        sharded = (node in pairs.columns or node in pairs.rows or node in pairs.vocabulary) and node not in whole
        for name, shape in parameters.of(info).items():
            users.setdefault(name, []).append(sharded and (len(shape) >= 2 or node in pairs.columns))
    return {name: part for name, each in users.items() if all(each)}
