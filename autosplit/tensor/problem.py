"""The choice of a way for every node of a graph, as tables of bytes on the wire.

A value that several nodes take may be wanted in another state than it is given in. Then it is moved once, for all that
want it so: each value has a variable for the one state, beside its own, in which it is at hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np
from torch import nn

from autosplit.tensor.axes import Axis, shard_if_any, shard_of
from autosplit.tensor.check import draws_in_parts, runs
from autosplit.tensor.entropy import class_loss_of
from autosplit.tensor.facts import Facts, NodeFacts, Operand, operand_of
from autosplit.tensor.moves import collectives
from autosplit.tensor.solve import Table, cheapest
from autosplit.tensor.ways import COPIED, PARTIAL, REPLICATED, State, Way, Whole, token_axes, ways_of
from autosplit.trace.graph import INFO, NodeClass

LATENCY_BYTES = float(2**18)
"""What an all-reduce costs beside its bytes: some microseconds of a link between GPUs of one host. Others, which take
half as many steps, cost half of it."""
_HELD = 0.25
"""Bytes on the wire that a byte of a result is worth which every rank computes and holds whole, where ranks can share
positions: an H100 reads and writes it six times in a forward and backward, at 3.35 TB/s, and sends 0.45 TB/s."""
SHARE = 0.002
"""How much of what can be sharded in a block may stay whole where that saves bytes on the wire."""
_LITTLE = 1e-3
"""Bytes that a node in another state than the replicated one costs: of equal plans that with the fewest is chosen."""
_UNSENT = ((REPLICATED, COPIED), (REPLICATED, PARTIAL))
_CLOSE = 2.0
"""How near the price that is found is to the least."""


def block_of(key: Operand) -> str:
    """Return the path of the block that a parameter is in: up to the first number; "" for none."""
    parts = key.split(".")
    return ".".join(parts[: next((n + 1 for n, name in enumerate(parts) if name.isdecimal()), 0)])


@dataclass
class Value:
    """A parameter, or the result of a node that parameters have a part in.

    Attributes:
        key: its name.
        states: those in which it can be given.
        bytes: of its elements.
        gradient: it has one.
        of_state: it does not depend on the batch: parts of it are never put together, which would undo the sharding.
        elements: of a parameter with several dimensions, else 0.
        takers: the nodes that take it.
    """

    key: Operand
    states: list[State]
    bytes: int
    gradient: bool
    of_state: bool
    elements: int = 0
    takers: list[Operand] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """The way of each node and the state of each value; those of ``fixed`` were not chosen with the others."""

    ways: dict[Operand, Way]
    states: dict[Operand, State]
    fixed: tuple[Operand, ...]


class Problem:
    """Ways and values of a graph's nodes at a number of ranks."""

    def __init__(
        self,
        facts: Facts,
        root: nn.Module,
        outputs: Collection[Operand],
        *,
        ranks: int,
        latency_bytes: float,
        pins: Mapping[str, int | None],
        draws: Collection[str],
        sequence: bool = True,
        any_size: bool = False,
    ) -> None:
        self.facts, self.root, self.ranks, self.latency_bytes = facts, root, ranks, latency_bytes
        self.values: dict[Operand, Value] = {}
        self.ways: dict[Operand, list[Way]] = {}
        self._alias: dict[Operand, Operand] = {}
        self._outputs = outputs
        self._draws = draws
        self._nested = {name for name, node in facts.nodes.items() if len(node.results) != 1}
        self._parameters(any_size, pins)
        self._tokens = token_axes(facts, ranks) if sequence else []
        self._nodes(any_size)

    @property
    def parameters(self) -> list[Operand]:
        """The parameters that nodes take."""
        return [key for key, value in self.values.items() if key not in self.ways]

    def _parameters(self, any_size: bool, pins: Mapping[str, int | None]) -> None:
        """Enter parameters, each once whatever its names, and collect the axes that may be sharded."""
        self.axes: dict[Axis, None] = {}
        first: dict[int, Operand] = {}
        for key, value in self.facts.values.items():
            parameter = attrgetter(key[1:])(self.root) if key.startswith(".") else None
            if not isinstance(parameter, nn.Parameter):
                continue
            if id(value) in first:
                self._alias[key] = first[id(value)]
                continue
            first[id(value)] = key
            dims = self.facts.dims[id(value)]
            states: list[State] = [REPLICATED]
            for atom in dict.fromkeys(atom for axis in dims for atom in axis.atoms()):
                divides = atom.size > 1 and (any_size or atom.size % self.ranks == 0)
                if divides and atom not in self.facts.outer and shard_if_any(dims, atom) is not None:
                    states.append(atom)
                    self.axes[atom] = None
            if key[1:] in pins:
                states = [s for s in states if self._dim(dims, s) == pins[key[1:]]] or [REPLICATED]
            elements = parameter.numel() if parameter.ndim > 1 else 0
            self.values[key] = Value(key, states, self.facts.bytes(key), parameter.requires_grad, True, elements)

    def _dim(self, dims: list[Axis], state: State) -> int | None:
        shard = shard_of(dims, state) if isinstance(state, Axis) else None
        return None if shard is None else shard.dim

    def _nodes(self, any_size: bool) -> None:
        for name, node in self.facts.nodes.items():
            operands = [self.of(key) for key in node.operands]
            taken = [self.values[key] for key in operands if key in self.values]
            if not taken:
                continue
            info = node.node.meta[INFO]
            ways = ways_of(self.facts, node, dict.fromkeys((*self.axes, *self._tokens)), random=info.random)
            ways = [w for w in ways if w.axis not in self._tokens or self._in_runs(node, w.axis)]
            if info.random:
                known = info.name in self._draws
                ways = [w for w in ways if w.axis is None or (known and draws_in_parts(self.facts, node, w.axis))]
            self.ways[name] = [*(w for w in ways if any_size or self._runs(name, w)), *self._loss_in_parts(node)]
            gradient = any(value.gradient for value in taken) and any(t.differentiable for t in info.tensors)
            of_state = info.node_class is NodeClass.SHARED
            states = list(dict.fromkeys(strategy.gives for strategy in self.ways[name]))
            self.values[name] = Value(name, states, self.facts.bytes(name), gradient, of_state)
            for key in dict.fromkeys(operands):
                if key in self.values:
                    self.values[key].takers.append(name)

    def _runs(self, name: str, strategy: Way) -> bool:
        """Tell whether a node gives what it should on a rank's parts."""
        return strategy.axis is None or runs(self.facts, self.root, self.facts.nodes[name], strategy, self.ranks)

    def _loss_in_parts(self, node: NodeFacts) -> Iterable[Way]:
        """Yield the ways to run a cross entropy on parts of its classes."""
        loss = class_loss_of(node.node)
        if loss is None:
            return
        logits, size = operand_of(loss.logits), self.facts.bytes(node.node.name)
        for axis in self.axes:
            shard = shard_if_any(self.facts.dims[self.facts.ids(logits)[0]], axis)
            if shard is not None and shard.dim == 1 and shard.plain:
                wants: dict[Operand, State] = dict.fromkeys(node.operands, REPLICATED)
                sums = size, (3 if loss.label_smoothing else 2) * size
                yield Way({**wants, logits: axis}, REPLICATED, axis, sums)

    def _in_runs(self, node: NodeFacts, axis: Axis) -> bool:
        """Tell whether a rank's part of all that a node takes and gives is one run, whatever the number of rows."""
        keys = [key for keys in (*node.operands.values(), node.results) for key in keys]
        shards = [shard_if_any(self.facts.dims[key], axis) for key in keys]
        return all(shard is None or shard.plain for shard in shards)

    def of(self, key: Operand) -> Operand:
        """Return the first name of a parameter, or the name itself."""
        return self._alias.get(key, key)

    def wants(self, strategy: Way, key: Operand) -> State:
        """Return the state in which a node takes a value."""
        return next(state for operand, state in strategy.wants.items() if self.of(operand) == key)

    # -- costs ---------------------------------------------------------------------------------------------------------
    def move_bytes(self, value: Value, source: State, target: State) -> float:
        """Return what moving a value from one state to another takes on the wire; infinite where it is not done."""
        if source is target:
            return 0.0
        if value.of_state and target not in self._tokens and (source, target) not in _UNSENT:
            return np.inf
        if value.key in self._nested:
            return np.inf
        return self._bytes(source, target, value.bytes, gradient=value.gradient, waited=value.key in self.ways)

    def _bytes(self, source: State, target: State, size: int, *, gradient: bool, waited: bool = True) -> float:
        """Return the bytes of a move; nothing waits for the sum of a parameter's gradient."""
        found = collectives(source, target, value_bytes=size, ranks=self.ranks, gradient=gradient)
        latency = self.latency_bytes * waited
        return sum(each.wire_bytes + latency / (1 if each.kind == "all_reduce" else 2) for each in found)

    def tables(self, price: float) -> list[Table]:
        """Return the tables; ``price``: the bytes on the wire that a replicated element of a parameter is worth."""
        tables = [*self._moves]
        for key, states in self._given.items():
            whole = _HELD * self.values[key].bytes * (1 - 1 / self.ranks) * bool(self._tokens)
            costs = [_LITTLE * (s is not REPLICATED) + whole * isinstance(s, Whole) for s in states]
            if (loss := class_loss_of(self.facts.nodes[key].node) if key in self.ways else None) is not None:
                kept = _HELD * self.facts.bytes(operand_of(loss.logits))  # their softmax
                costs = [_LITTLE + kept / (self.ranks if way.sums else 1) + self._inside(way) for way in self.ways[key]]
            if key not in self.ways:
                costs = [price * self.values[key].elements * (state is REPLICATED) for state in states]
            tables.append(Table((("value", key),), np.array(costs)))
        return tables

    def _inside(self, way: Way) -> float:
        return sum(self._bytes(PARTIAL, REPLICATED, size, gradient=False) for size in way.sums)

    @cached_property
    def _given(self) -> dict[Operand, list[State]]:
        """The state of each value for each way of its node, or each state of a parameter."""
        return {
            key: [strategy.gives for strategy in self.ways[key]] if key in self.ways else value.states
            for key, value in self.values.items()
        }

    @cached_property
    def _moves(self) -> list[Table]:
        return [
            table
            for key, states in self._given.items()
            for table in self._edges(self.values[key], ("value", key), states)
        ]

    def _edges(self, value: Value, variable: tuple, states: list[State]) -> Iterable[Table]:
        takers: list[tuple[tuple, list[State]]] = [
            (("value", taker), [self.wants(strategy, value.key) for strategy in self.ways[taker]])
            for taker in value.takers
        ]
        if value.key in self._outputs:
            takers.append((("output", value.key), [REPLICATED]))
        wanted = list(dict.fromkeys(state for _, wants in takers for state in wants))
        cost = np.array([[self.move_bytes(value, s, w) for w in wanted] for s in states]).reshape(len(states), -1)
        if len(takers) > 1:
            at_hand = ("at hand", value.key)
            yield Table((variable, at_hand), cost)
        for taker, wants in takers:
            chosen = cost[:, [wanted.index(want) for want in wants]]
            if len(takers) == 1:
                yield Table((variable, taker), chosen)
                continue
            table = np.repeat(chosen[:, None, :], len(wanted), axis=1)
            for index, state in enumerate(wanted):
                table[:, index, [n for n, want in enumerate(wants) if want is state]] = 0
            yield Table((variable, at_hand, taker), table)

    # -- solving -------------------------------------------------------------------------------------------------------
    def solved(self) -> Choice:
        """Return the choice of fewest bytes among those that leave no more than a share of parameters replicated."""
        dear = 1e9
        best = self._cheapest(dear)
        least = self.replicated(best)
        most = {group: n + SHARE * (self._total[group] - n) for group, n in least.items()}
        low, high = 1e-9, dear
        while high / low > _CLOSE:
            price = float(np.sqrt(low * high))
            choice = self._cheapest(price)
            if all(n <= most[group] for group, n in self.replicated(choice).items()):
                best, high = choice, price
            else:
                low = price
        return best

    def replicated(self, choice: Choice) -> dict[str, int]:
        """Return how many elements of parameters every rank has, of each block."""
        counts = dict.fromkeys(self._total, 0)
        for key in self.parameters:
            counts[block_of(key)] += self.values[key].elements * (choice.states[key] is REPLICATED)
        return counts

    @cached_property
    def _total(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for key in self.parameters:
            counts[block_of(key)] = counts.get(block_of(key), 0) + self.values[key].elements
        return counts

    def _cheapest(self, price: float) -> Choice:
        best = cheapest(self.tables(price))
        chosen = best.chosen
        ways = {name: ways[chosen["value", name]] for name, ways in self.ways.items()}
        states = {
            key: ways[key].gives if key in ways else value.states[chosen["value", key]]
            for key, value in self.values.items()
        }
        fixed = [key for key in self.values if not {("value", key), ("at hand", key)}.isdisjoint(best.fixed)]
        return Choice(ways, states, tuple(key.removeprefix(".") for key in fixed))
