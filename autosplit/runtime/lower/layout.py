"""Who needs which value where: the uses of every value of a recording under a given assignment to stages.

A *use* is one consumer node of a value. Values that reach the program itself (batched inputs, shared values, tied
parameters) are forked there, one alias per use; values that micro nodes make cross from stage to stage in bundles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autosplit.runtime.ops import OUT
from autosplit.trace.graph import INFO, NodeClass, TracedGraph

EPILOGUE = "epilogue"


@dataclass(frozen=True)
class Slot:
    """A value, or one numbered alias of it, in a bundle."""

    value: str
    use: int | None = None


@dataclass
class StageLayout:
    """The inputs and outputs of one stage, as bundles of slots.

    Attributes:
        nodes: the micro nodes, in model order.
        inputs: aliases of batched inputs that the stage takes per microbatch.
        shared: aliases of shared values, unbatched inputs and tied parameters that it takes once per step.
        received: per producer stage, the bundle that comes from it.
        sent: per consumer stage (its number as text) or ``"out"``, the bundle that goes there.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[Slot] = field(default_factory=list)
    shared: list[Slot] = field(default_factory=list)
    received: dict[int, list[Slot]] = field(default_factory=dict)
    sent: dict[str, list[Slot]] = field(default_factory=dict)


@dataclass
class PrologueLayout:
    """The shared nodes of one stage: what they take from the program or earlier prologues, and what they give."""

    nodes: list[fx.Node] = field(default_factory=list)
    takes: list[Slot] = field(default_factory=list)
    gives: list[Slot] = field(default_factory=list)


@dataclass
class Layout:
    """All stages, their prologues, the epilogue, and the aliases that consumers take.

    Attributes:
        given: values that the program itself holds (inputs, parameters of `homes_of`), with the number of aliases.
        home: the stage of every shared value and parameter that the program holds.
        alias_of: the number of the alias that a consumer takes of a given or shared value, by (value, consumer).
        uses: number of uses of every value; the epilogue counts as one, and so does the caller, except of its inputs.
        forked: micro values that are forked on the stage that computes them.
        merged: micro values that the epilogue or the caller needs for the whole batch, with the stage of each.
    """

    traced: TracedGraph
    stages: list[StageLayout]
    prologues: list[PrologueLayout]
    epilogue: list[fx.Node] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)
    home: dict[str, int] = field(default_factory=dict)
    alias_of: dict[tuple[str, str], int] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    forked: set[str] = field(default_factory=set)
    merged: dict[str, int] = field(default_factory=dict)

    def read_once(self) -> list[str]:
        """Return the names of parameters and buffers that are tied between stages, or that shared nodes read."""
        root, names = self.traced.root, {name: None for name in self.given if name in self.home}
        for node in (node for prologue in self.prologues for node in prologue.nodes):
            names.update((str(operand.target), None) for operand in tensor_operands(node) if operand.op == "get_attr")
            if node.op == "call_module":
                module = root.get_submodule(str(node.target))
                names.update(
                    (f"{node.target}.{name}", None) for name, _ in (*module.named_parameters(), *module.named_buffers())
                )
        return list(names)

    def alias(self, value: str, consumer: str) -> Slot:
        """Return the alias of a given or shared value that a consumer takes."""
        return Slot(value, self.alias_of[value, consumer])


def lay_out(traced: TracedGraph, stage_of: Mapping[str, int], stages: int) -> Layout:
    """Compute the layout for an assignment of stable node names to stages."""
    layout = Layout(traced, [StageLayout() for _ in range(stages)], [PrologueLayout() for _ in range(stages)])
    for node, info in traced.compute_nodes():
        stage = stage_of[info.name]
        if info.node_class is NodeClass.MICRO:
            layout.stages[stage].nodes.append(node)
        elif info.node_class is NodeClass.SHARED:
            layout.prologues[stage].nodes.append(node)
        else:
            layout.epilogue.append(node)
    _Uses(layout, stage_of).collect()
    return layout


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the value operands of a node: tensor nodes and parameters, through sizes and plumbing; each once."""
    operands: dict[fx.Node, None] = {}
    for operand in node.all_input_nodes:
        if operand.op == "get_attr" or INFO in operand.meta:
            operands[operand] = None
        elif operand.op != "placeholder":
            operands.update(dict.fromkeys(tensor_operands(operand)))
    return list(operands)


def homes_of(traced: TracedGraph, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Return the stages of the parameters that are values of the program: of tied ones, and what later stages use."""
    first: dict[str, int] = {}
    for node, info in traced.compute_nodes():
        for name in (str(operand.target) for operand in tensor_operands(node) if operand.op == "get_attr"):
            first[name] = min(first.get(name, stage_of[info.name]), stage_of[info.name])
    homes = {name: min(stage, traced.homes.get(name, stage)) for name, stage in first.items()}
    return {name: stage for name, stage in homes.items() if name in traced.tied or stage < first[name]}


def _class(node: fx.Node) -> NodeClass:
    return node.meta[INFO].node_class


class _Uses:
    def __init__(self, layout: Layout, stage_of: Mapping[str, int]) -> None:
        self.layout = layout
        self.traced = layout.traced
        self.stage_of = stage_of
        self.homes = homes_of(layout.traced, stage_of)
        output = next(iter(reversed(self.traced.graph.nodes)))
        # in the graph's order, which is the same in every process; that of a set is not
        self.outputs = dict.fromkeys(n for n in output.all_input_nodes if INFO in n.meta and n.op != "placeholder")
        self.consumers: dict[str, list[fx.Node]] = defaultdict(list)
        self.values: dict[str, fx.Node] = {}
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" or INFO not in node.meta:
                continue
            for operand in tensor_operands(node):
                key = self.key(operand)
                if key is not None:
                    self.consumers[key].append(node)
                    self.values[key] = operand

    def key(self, operand: fx.Node) -> str | None:
        """Name a value: a tied parameter by its qualified name, a tensor by its fx name; None for a plain attribute."""
        if operand.op == "get_attr":
            return str(operand.target) if operand.target in self.homes else None
        return str(operand.name)

    def stage(self, node: fx.Node) -> int:
        return self.stage_of[node.meta[INFO].name]

    def collect(self) -> None:
        for node in self.outputs:
            self.values.setdefault(node.name, node)
        for key, value in self.values.items():
            if value.op == "get_attr" or value.op == "placeholder" or _class(value) is NodeClass.SHARED:
                self._program_value(key, value, self.consumers[key])
            elif _class(value) is NodeClass.MICRO:
                self._micro_value(key, value, self.consumers[key])

    def _program_value(self, key: str, value: fx.Node, consumers: list[fx.Node]) -> None:
        layout = self.layout
        outside = value.op in ("get_attr", "placeholder")
        takers = [c for c in consumers if _class(c) is not NodeClass.FULL]
        late = [EPILOGUE] * (len(takers) < len(consumers)) + [OUT] * (value in self.outputs)
        if not outside:
            layout.home[key] = self.stage(value)
        elif value.op == "get_attr":
            layout.home[key] = self.homes[key]
        if value.op == "placeholder" and value.meta[INFO].mutated:
            takers = self._changed_input(key, takers)
        for number, consumer in enumerate(takers):
            layout.alias_of[key, consumer.name] = number
            slot, stage = Slot(key, number), self.stage(consumer)
            if _class(consumer) is NodeClass.MICRO:
                batched = value.op == "placeholder" and _class(value) is NodeClass.MICRO
                (layout.stages[stage].inputs if batched else layout.stages[stage].shared).append(slot)
            elif outside or stage != layout.home[key]:
                layout.prologues[stage].takes.append(slot)
            else:
                continue
            if not outside:
                layout.prologues[layout.home[key]].gives.append(slot)
        for number, name in enumerate(late, start=len(takers)):
            layout.alias_of[key, name] = number
            if not outside:
                layout.prologues[layout.home[key]].gives.append(Slot(key, number))
        layout.uses[key] = len(takers) + len(late)
        if outside:
            layout.given[key] = layout.uses[key]

    def _changed_input(self, key: str, takers: list[fx.Node]) -> list[fx.Node]:
        """Return the consumers that take an input which the model changes in place from the caller.

        All nodes up to its last change are in one stage; later stages get it from there.
        """
        micro = [c for c in takers if _class(c) is NodeClass.MICRO]
        late = [c for c in micro if self.stage(c) != self.stage(micro[0])]
        for consumer in late:
            self._send(key, None, self.stage(micro[0]), self.stage(consumer))
        return [c for c in takers if c not in late]

    def _micro_value(self, key: str, value: fx.Node, consumers: list[fx.Node]) -> None:
        layout = self.layout
        home = self.stage(value)
        wanted = value in self.outputs or any(_class(c) is NodeClass.FULL for c in consumers)
        inside = [c for c in consumers if _class(c) is NodeClass.MICRO]
        layout.uses[key] = len(inside) + wanted
        remote = [c for c in inside if self.stage(c) != home]
        if wanted:
            layout.merged[key] = home
        if not remote and not wanted:
            return
        stages = [self.stage(c) for c in inside]
        targets = len({s for s in stages if s != home}) + wanted
        ordered = stages == sorted(stages)
        info = value.meta[INFO]
        forks = (targets > 1 or not ordered) and info.tensors[0].differentiable and not info.mutated
        if forks:
            layout.forked.add(key)
            layout.alias_of.update({(key, c.name): use for use, c in enumerate(inside)})
        for use, consumer in enumerate(inside):
            if self.stage(consumer) != home:
                self._send(key, use if forks else None, home, self.stage(consumer))
        if wanted:
            self._append(layout.stages[home].sent.setdefault(OUT, []), Slot(key, len(inside) if forks else None))

    def _send(self, key: str, use: int | None, home: int, target: int) -> None:
        slot = Slot(key, use)
        self._append(self.layout.stages[home].sent.setdefault(str(target), []), slot)
        self._append(self.layout.stages[target].received.setdefault(home, []), slot)

    def _append(self, bundle: list[Slot], slot: Slot) -> None:
        if slot not in bundle:
            bundle.append(slot)
