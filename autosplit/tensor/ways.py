"""The ways in which a node can run on tensor-parallel ranks, each with what it wants of its operands.

A value is in one of these states, each a pair of what ranks hold and what they hold of its gradient:

    state       value               gradient            such as
    REPLICATED  the whole           the whole           the residual stream of a transformer
    COPIED      the whole           a summand           what a column-wise linear takes: each rank uses it for its part
    PARTIAL     a summand           the whole           what a row-wise linear gives
    an axis     its part            its part            what lies between the two

A node that works on parts of an axis takes operands that have the axis in parts and others whole, of whose gradients
it makes a summand. Where its results lack the axis they are summands, if it is linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from autosplit.tensor.axes import Axis, Incompatible, shard_of
from autosplit.tensor.facts import Facts, NodeFacts, Operand
from autosplit.tensor.follow import Call


class Whole(Enum):
    """The states in which no axis is in parts."""

    REPLICATED = "replicated"
    COPIED = "copied"
    PARTIAL = "partial"

    def __repr__(self) -> str:
        return self.value


REPLICATED, COPIED, PARTIAL = Whole.REPLICATED, Whole.COPIED, Whole.PARTIAL
State = Whole | Axis


@dataclass(frozen=True)
class Way:
    """One way to run a node.

    Attributes:
        wants: the state in which it takes each operand.
        gives: the state of its results.
        axis: the axis of which each rank does its part; None: each rank does the whole node.
        sums: the bytes of values that are summed over the ranks inside of it.
    """

    wants: Mapping[Operand, State]
    gives: State
    axis: Axis | None = None
    sums: tuple[int, ...] = ()


def ways_of(facts: Facts, node: NodeFacts, axes: Collection[Axis], *, random: bool) -> list[Way]:
    """Return the ways to run a node, the replicated one first; ``axes`` are those that may be sharded."""
    ways = [Way(dict.fromkeys(node.operands, REPLICATED), REPLICATED)]
    if node.in_place or node.opaque:  # a backward of its own need not be linear, so that it takes no summands
        return ways
    ways.append(Way(dict.fromkeys(node.operands, COPIED), COPIED))
    met = {atom for key in (*_tensors(node),) for axis in facts.dims[key] for atom in axis.atoms()}
    for axis in axes:
        if axis in met:
            strategy = _followed(facts, node, {}, axis)
            if strategy is not None and strategy.gives is not REPLICATED:
                ways.append(strategy)
    if not random:
        for operand in node.operands:
            strategy = _followed(facts, node, {operand: PARTIAL}, None)
            if strategy is not None and strategy.gives is PARTIAL and strategy.wants not in [w.wants for w in ways]:
                ways.append(strategy)
    return ways


def token_axes(facts: Facts, ranks: int) -> list[Axis]:
    """Return the axes other than the weights' along which ranks can share what lies between products.

    They are dimensions of the results of several products, positions of a text for example, of a size that every call
    has and that ``ranks`` divides.
    """
    products = [node for node in facts.nodes.values() if node.flops and any(key[0] == "." for key in node.operands)]
    weights = {key for node in products for name, keys in node.operands.items() if name[0] == "." for key in keys}
    others = {atom for key in weights for axis in facts.dims[key] for atom in axis.atoms()} | facts.varying
    results = [{axis.found() for key in node.results for axis in facts.dims[key]} for node in products]
    counts = Counter(axis for axes in results for axis in axes if axis.is_atom and axis not in others)
    return [axis for axis, count in counts.items() if count > 1 and axis.size > 1 and axis.size % ranks == 0]


def _tensors(node: NodeFacts) -> list[int]:
    return [key for call in node.calls for key in (*call.inputs, *call.outputs)] + node.results


def _followed(facts: Facts, node: NodeFacts, partial: dict[Operand, State], axis: Axis | None) -> Way | None:
    """Follow states through a node's operations; None where one of them cannot be done so."""
    owner = {key: operand for operand, keys in node.operands.items() for key in keys}
    wants: dict[Operand, State] = {}
    try:
        for operand, keys in node.operands.items():
            has = axis is not None and any(shard_of(facts.dims[key], axis) for key in keys)
            wants[operand] = axis if has and axis is not None else partial.get(operand, REPLICATED)
        states: dict[int, State] = {key: wants[operand] for key, operand in owner.items()}
        for call in node.calls:
            state, summands = _through(facts, call, states, axis)
            added = [key for key in summands if states.get(key, REPLICATED) is REPLICATED]
            if any(key not in owner for key in added):
                return None
            if any(states[key] is not PARTIAL for key in added):
                more = {owner[key]: PARTIAL for key in added}
                return _followed(facts, node, {**partial, **more}, axis)
            states.update(dict.fromkeys(call.outputs, state))
        results = {states.get(key, REPLICATED) for key in node.results}
        for key in (*node.results, *states):
            if states.get(key) is axis and axis is not None and shard_of(facts.dims[key], axis) is None:
                return None
    except Incompatible:
        return None
    if len(results) != 1:
        return None
    split = any(state is not REPLICATED for state in wants.values()) or REPLICATED not in results
    return Way({k: COPIED if s is REPLICATED and split else s for k, s in wants.items()}, results.pop(), axis)


def _through(facts: Facts, call: Call, states: Mapping[int, State], axis: Axis | None) -> tuple[State, list[int]]:
    """Return the state of an operation's results, and the operands that must be summands for it."""
    inside = {key for key in call.inputs if axis is not None and states.get(key) is axis}
    partial = {key for key in call.inputs if states.get(key) is PARTIAL}
    has = axis is not None and any(shard_of(facts.dims[key], axis) is not None for key in call.outputs)
    if axis is not None:
        for key in call.inputs:
            if key not in inside and shard_of(facts.dims[key], axis) is not None:
                raise Incompatible
        if (inside or has) and any(axis is atom for blocked in call.blocked for atom in blocked.atoms()):
            raise Incompatible
    if has and (inside or call.expands):
        if partial or any(shard_of(facts.dims[key], axis) is None for key in call.outputs if axis is not None):
            raise Incompatible
        assert axis is not None
        return axis, []
    if has and call.inputs:
        raise Incompatible
    if not inside and not partial:
        return REPLICATED, []
    return PARTIAL, _summands(call, inside, partial)


def _summands(call: Call, inside: set[int], partial: set[int]) -> list[int]:
    """Return the operands that stand alone in a sum of summands; Incompatible where the result is no such sum."""
    used = {key for term in call.terms for key in term}
    if not call.terms or not (inside | partial) <= used:
        raise Incompatible
    alone = []
    for term in call.terms:
        summed = [key for key in term if key in partial]
        cut = [key for key in term if key in inside]
        if len(summed) > 1 or (summed and cut):
            raise Incompatible
        if not summed and not cut:
            if len(term) != 1:
                raise Incompatible
            alone.append(term[0])
    return alone
