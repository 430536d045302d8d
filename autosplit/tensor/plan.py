"""A tensor-parallel plan: how each parameter lies on the ranks, and the collectives of a step.

    recording ─► one run on fake tensors: axes, what each node does to them ─► ways of each node
              ─► fewest bytes on the wire among the plans that shard nearly all that can be ─► TensorPlan

Repeated blocks are planned once, in context, and the others take over what their template was given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from torch import fx

from autosplit.errors import InputError, listed
from autosplit.profile.blocks import shorten_graph
from autosplit.tensor.axes import Axis, Shard, shard_of
from autosplit.tensor.collectives import Placement
from autosplit.tensor.facts import Facts, Operand, Run, operand_of
from autosplit.tensor.local import linear_of
from autosplit.tensor.moves import Collective, collectives
from autosplit.tensor.problem import LATENCY_BYTES, Choice, Problem
from autosplit.tensor.ways import COPIED, PARTIAL, REPLICATED, State, Way
from autosplit.trace.borrowed.state import attributes
from autosplit.trace.graph import INFO, TracedGraph

Placements = tuple[Placement, ...]
"""How the tensors of a value lie, one after the other."""


@dataclass(frozen=True)
class NodePlan:
    """How a node runs on a rank.

    Attributes:
        name: the node's stable name.
        wants: how it takes its operands, by their names.
        gives: how its results lie.
        share: the part of its work that a rank does.
        flops: of its forward on one device.
        value_bytes: of its whole results.
        gradient: they have one.
        sums: the bytes of values that are summed over the ranks inside of it.
        product: it multiplies a value with a parameter, "trained" or "frozen", and does nothing else; or "".
    """

    name: str
    wants: Mapping[Operand, Placements]
    gives: Placements
    share: float
    flops: int
    value_bytes: int
    gradient: bool
    sums: tuple[int, ...] = ()
    product: Literal["trained", "frozen", ""] = ""


@dataclass(frozen=True)
class NodeCollective:
    """A collective that a value takes on its way to others: ``node`` makes it, or is a parameter; ``users`` take it."""

    node: str
    users: tuple[str, ...]
    collective: Collective


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan for one batch size.

    Attributes:
        ranks: how many ranks share each sharded parameter.
        rows: the batch rows that bytes and FLOPs are for.
        parameters: how each parameter lies, by all its names.
        replicated: why parameters with more than one dimension stay whole.
        collectives: those of one forward and backward.
        nodes: by the names of fx nodes; nodes that are not in it run whole, on whole values without gradients.
        elements: of each parameter.
        fixed: values that too many others share: their placement was chosen before the others', so the bytes on the
            wire may not be the fewest.
    """

    ranks: int
    rows: int
    parameters: Mapping[str, Placement]
    replicated: Mapping[str, str]
    collectives: tuple[NodeCollective, ...]
    nodes: Mapping[str, NodePlan]
    elements: Mapping[str, int]
    fixed: tuple[str, ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends in a forward and backward."""
        return sum(entry.collective.wire_bytes for entry in self.collectives)

    @cached_property
    def gathered(self) -> Mapping[Operand, tuple[str, ...]]:
        """The products that values are gathered for, by fx names: ranks keep parts of these values, see `products`."""
        return _gathered(self.nodes)


def tensor_plan(
    traced: TracedGraph,
    *,
    ranks: int,
    rows: int,
    latency_bytes: float = LATENCY_BYTES,
    pins: Mapping[str, int | None] | None = None,
    draws: Collection[str] = (),
    sequence: bool = True,
) -> TensorPlan:
    """Find a plan for a recording; no weights are needed.

    ``latency_bytes``: a collective costs as much as sending so many bytes more. ``pins``: the dimensions by which some
    parameters are sharded, or None for whole; others are chosen. ``draws``: the nodes whose random numbers are drawn
    for the whole tensor, of which ranks take their parts; others run whole. ``sequence``: what lies between pairs of
    products (norms, dropout, sums) may be in parts of another axis than the weights', the positions of a text for
    example (Korthikanti et al. 2022, arXiv 2205.05198).

    Raises InputError where a size that attention or a pair of projections would be sharded by is not a multiple of
    ``ranks`` and nothing else takes its place.
    """
    options = {"ranks": ranks, "latency_bytes": latency_bytes, "pins": pins or {}, "draws": draws}
    options["sequence"] = sequence
    with attributes(traced.root):
        return _Planner(traced, ranks, rows, options).plan()


def check_sharded(plan: TensorPlan) -> None:
    """Raise InputError where ranks would share nothing."""
    if not any(isinstance(placement, Shard) for placement in plan.parameters.values()):
        reasons = [f"{name}: {why}" for name, why in plan.replicated.items()]
        raise InputError(f"tp={plan.ranks} shards no parameter of the model ({listed(reasons)}); use another degree")


class _Planner:
    def __init__(self, traced: TracedGraph, ranks: int, rows: int, options: dict[str, Any]) -> None:
        self.traced, self.ranks, self.rows = traced, ranks, rows
        self.graph, self.runs = shorten_graph(traced)
        self.facts: Facts = Run(traced, self.graph, rows=rows).whole()
        outputs = {operand_of(o) for node in self.graph.nodes if node.op == "output" for o in node.all_input_nodes}
        self._options = options
        self.outputs = outputs
        self.problem = self._problem()

    def _problem(self, *, any_size: bool = False) -> Problem:
        return Problem(self.facts, self.traced.root, self.outputs, any_size=any_size, **self._options)

    def plan(self) -> TensorPlan:
        """Solve and write down."""
        choice = self.problem.solved()
        reasons = self._reasons(choice)
        nodes = {name: self._node(name, strategy) for name, strategy in choice.ways.items()}
        parameters = {key: self._placed(key, choice.states[key]) for key in self.problem.parameters}
        nodes, parameters, reasons = self._expanded(nodes, parameters, reasons)
        return replace(self._written(nodes, parameters, reasons), fixed=choice.fixed)

    def _placed(self, key: Operand, state: State) -> Placements:
        if not isinstance(state, Axis):
            return (state,) * max(len(self.facts.ids(key)), 1)
        return tuple(shard_of(self.facts.dims[number], state) or REPLICATED for number in self.facts.ids(key))

    def _node(self, name: str, strategy: Way) -> NodePlan:
        facts = self.facts.nodes[name]
        wants = {key: self._placed(key, state) for key, state in strategy.wants.items()}
        share = 1 if strategy.axis is None else 1 / self.ranks
        value = self.problem.values[name]
        gives = self._placed(name, strategy.gives)
        stable = facts.node.meta[INFO].name
        linear = linear_of(facts.node, self.traced.root)
        product: Any = "" if linear is None else "trained" if linear.trained(self.traced.root) else "frozen"
        return NodePlan(stable, wants, gives, share, facts.flops, value.bytes, value.gradient, strategy.sums, product)

    # -- what stays replicated -----------------------------------------------------------------------------------------
    def _reasons(self, choice: Choice) -> dict[Operand, str]:
        """Say of each parameter with several dimensions that stays replicated why that is."""
        problem = self.problem
        whole = [
            key
            for key in problem.parameters
            if choice.states[key] is REPLICATED and len(self.facts.dims[self.facts.ids(key)[0]]) > 1
        ]
        uneven = self._uneven(choice, whole)
        reasons = {}
        for key in whole:
            opaque = [self.facts.nodes[name].opaque for name in problem.values[key].takers]
            if key in uneven:
                size = uneven[key]
                reasons[key] = f"tp={self.ranks} does not divide {size} (degrees that do: {_divisors(size)})"
            elif any(opaque):
                reasons[key] = next(text for text in opaque if text)
            elif len(problem.values[key].states) > 1:
                reasons[key] = "sharding it takes more bytes on the wire than it is worth"
            else:
                reasons[key] = "no dimension of it can be computed in parts"
        return reasons

    def _uneven(self, choice: Choice, whole: Iterable[Operand]) -> dict[Operand, int]:
        """Return the parameters that would be sharded if sizes were multiples, with the size."""
        whole = set(whole)
        ranks, outer = self.ranks, self.facts.outer
        atoms = {a for key in whole for d in self.facts.dims[self.facts.ids(key)[0]] for a in d.atoms()} - outer
        if all(atom.size % ranks == 0 or atom.size == 1 for atom in atoms):
            return {}
        ideal = self._problem(any_size=True)
        best = ideal.solved()
        uneven = {key: s.size for key in whole if isinstance(s := best.states[key], Axis) and s.size % ranks}
        for strategy in best.ways.values():
            axis = strategy.axis
            if axis is None or strategy.gives is not PARTIAL or axis.size % ranks == 0:
                continue
            taken = [key for key, state in strategy.wants.items() if state is axis and key not in ideal.parameters]
            sharded = [key for key in ideal.parameters if best.states[key] is axis]
            if taken and sharded and whole.issuperset(sharded):
                names = ", ".join(key.removeprefix(".") for key in sharded[:3])
                raise InputError(
                    f"tp={ranks} does not divide {axis.size}, by which {names} would be sharded; "
                    f"degrees that do: {_divisors(axis.size)}"
                )
        return uneven

    # -- the whole model -----------------------------------------------------------------------------------------------
    def _expanded(
        self, nodes: dict[str, NodePlan], parameters: dict[Operand, Placements], reasons: dict[Operand, str]
    ) -> tuple[dict[str, NodePlan], dict[Operand, Placements], dict[Operand, str]]:
        """Give the blocks that a template stands for what it was given."""
        for run in self.runs:
            before, template = run.nodes[0], run.nodes[1]
            for number in range(2, len(run.nodes) - 1):
                names = self._names(template, run.nodes[number])
                taken = self._names(before, run.nodes[number - 1]) | names
                for mine, twin in zip(template, run.nodes[number], strict=True):
                    if mine.name in nodes:
                        copied = _renamed(nodes[mine.name], taken)
                        nodes[twin.name] = replace(copied, name=twin.meta[INFO].name)
                parameters |= {names[key]: placed for key, placed in parameters.items() if key in names}
                reasons |= {names[key]: text for key, text in reasons.items() if key in names}
            taken = self._names(template, run.nodes[-2])
            for node in run.nodes[-1]:
                if node.name in nodes:
                    nodes[node.name] = _renamed(nodes[node.name], taken)
        return nodes, parameters, reasons

    def _names(self, block: Iterable[fx.Node], other: Iterable[fx.Node]) -> dict[Operand, Operand]:
        """Map what names values of one block to what names them in another."""
        names: dict[Operand, Operand] = {}
        for node, two in zip(block, other, strict=True):
            names[operand_of(node)] = operand_of(two)
            if node.op == "call_module":
                for name, _ in self.traced.root.get_submodule(str(node.target)).named_parameters():
                    names[f".{node.target}.{name}"] = f".{two.target}.{name}"
        return names

    def _written(
        self, nodes: dict[str, NodePlan], placed: dict[Operand, Placements], reasons: dict[Operand, str]
    ) -> TensorPlan:
        root = self.traced.root
        by_tensor: dict[int, Placement] = {}
        why: dict[int, str] = {}
        for key, (placement, *_) in placed.items():
            tensor = attrgetter(key.removeprefix("."))(root)
            by_tensor[id(tensor)] = placement
            why[id(tensor)] = reasons.get(key, "")
        names = dict(root.named_parameters(remove_duplicate=False))
        unused = "no node that can be sharded takes it"
        parameters = {name: by_tensor.get(id(p), REPLICATED) for name, p in names.items()}
        replicated = {
            name: why.get(id(p)) or unused for name, p in names.items() if p.ndim > 1 and parameters[name] is REPLICATED
        }
        elements = {name: p.numel() for name, p in names.items()}
        moves = tuple(self._collectives(nodes, placed))
        return TensorPlan(self.ranks, self.rows, parameters, replicated, moves, nodes, elements)

    def _collectives(self, nodes: dict[str, NodePlan], placed: dict[Operand, Placements]) -> Iterable[NodeCollective]:
        """Yield what values take: one move for each placement in which others want one, and what nodes sum inside."""
        for plan in nodes.values():
            for size in plan.sums:
                (needed,) = collectives(PARTIAL, REPLICATED, value_bytes=size, ranks=self.ranks, gradient=False)
                yield NodeCollective(plan.name, (plan.name,), needed)
        products = _gathered(nodes)
        for key, users in _users(self.traced, nodes).items():
            if key in nodes:
                node = nodes[key]
                name, placements, size, gradient = node.name, node.gives, node.value_bytes, node.gradient
            elif key in placed:
                name, placements = key.removeprefix("."), placed[key]
                tensor = attrgetter(name)(self.traced.root)
                size = tensor.numel() * tensor.element_size()
                gradient = tensor.requires_grad
            else:
                continue
            for want in dict.fromkeys(want for _, want in users):
                if want != placements:
                    takers = tuple(name for name, other in users if other == want)
                    again = want == (COPIED,) and key in products
                    how: Any = {"value_bytes": size, "ranks": self.ranks, "gradient": gradient, "again": again}
                    yield from (NodeCollective(name, takers, c) for c in collectives(placements[0], want[0], **how))


def _gathered(nodes: Mapping[str, NodePlan]) -> dict[Operand, tuple[str, ...]]:
    """Return the values that nothing but products take as wholes, and these."""
    takers: dict[Operand, list[str]] = {}
    for name, plan in nodes.items():
        for key, want in plan.wants.items():
            if key in nodes and want == (COPIED,) and isinstance(nodes[key].gives[0], Shard):
                takers.setdefault(key, []).append(name)
    kinds = {key: {nodes[name].product for name in names} for key, names in takers.items()}
    return {key: (*names,) for key, names in takers.items() if "" not in kinds[key] and "trained" in kinds[key]}


def _renamed(plan: NodePlan, names: Mapping[Operand, Operand]) -> NodePlan:
    return replace(plan, wants={names.get(key, key): placed for key, placed in plan.wants.items()})


def _users(traced: TracedGraph, nodes: Mapping[str, NodePlan]) -> dict[Operand, list[tuple[str, Placements]]]:
    """Map values to those that take them, and how they want them."""
    users: dict[Operand, list[tuple[str, Placements]]] = {}
    for plan in nodes.values():
        for key, want in plan.wants.items():
            users.setdefault(key, []).append((plan.name, want))
    for node in traced.graph.nodes:
        if node.op == "output":
            for operand in node.all_input_nodes:
                count = len(nodes[operand.name].gives) if operand.name in nodes else 1
                users.setdefault(operand_of(operand), []).append(("output", (REPLICATED,) * count))
    return users


def _divisors(size: int) -> str:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return ", ".join(map(str, sorted({*small, *(size // n for n in small)})))
