"""The pipelined program: one fx graph that performs the forwards of a step's list, entry by entry, in clock order.

    1RECV_F0    y0_0_on1 = transfer(y0_0['1'], lanes[0], lanes[1], done0_0)    waits for the event that a send records
    1F0         y1_0 = self.stage1(y0_0_on1)                                   y<stage>_<microbatch>
    1SEND_F0    done1_0 = record(lanes[1])

Between stages of one lane nothing is sent. What happens once per step comes before and behind the cells; in steps that
keep a graph per cell it runs as programs of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autosplit.runtime.lower.layout import EPILOGUE, Layout, Slot
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.lower.text import readable
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import ENDING, OUT, SHARED, CellContext, fork, merge, record, split, transfer
from autosplit.runtime.regions import Recomputed
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.entry import Entry, Receive, Route, Send
from autosplit.schedule.order import in_clock_order, lane_lists
from autosplit.trace.graph import INFO, LENGTH, NodeClass
from autosplit.trace.recording.build import named

STATE = "_model"


def emit(lowered: Lowered, schedule: Schedule, *, attributes: Mapping[str, str]) -> fx.Graph:
    """Emit the program for a schedule of forwards.

    ``attributes`` maps ``stage0``, ``shared0``, ``epilogue`` to the attribute names under which the modules will lie.
    """
    program = Program(lowered, attributes)
    program.cells_and_end(in_clock_order(schedule, lane_lists(schedule, lowered.sources)))
    readable(program.graph)
    return program.graph


def slots_of(layout: Layout, stage: int) -> list[Slot]:
    """Return what a stage takes once per step: its shared nodes, and its cells."""
    return [*layout.prologues[stage].takes, *layout.stages[stage].shared]


def ending_slots(lowered: Lowered) -> list[Slot]:
    """Return the values from before the first cell that the epilogue and the caller take."""
    layout = lowered.layout
    wanted = [s.value for s in lowered.epilogue_inputs if s.value not in layout.merged]
    slots = [layout.alias(value, EPILOGUE) for value in wanted]
    for value in lowered.outputs:
        if isinstance(value, fx.Node) and _from_beginning(value):
            slots.append(layout.alias(value.name, OUT))
    return list(dict.fromkeys(slots))


def _from_beginning(value: fx.Node) -> bool:
    info = value.meta.get(INFO)
    return info is not None and value.op != "placeholder" and info.node_class is NodeClass.SHARED


class Program:
    """Emits a program, or the parts of one that run once per step (:mod:`autosplit.runtime.lower.once`)."""

    def __init__(self, lowered: Lowered, attributes: Mapping[str, str]) -> None:
        self.lowered = lowered
        self.layout = lowered.layout
        self.attributes = attributes
        self.graph = fx.Graph()
        self.values: dict[Slot, fx.Node] = {}
        self.done: dict[tuple[int, int], fx.Node] = {}
        self.arrived: dict[Route, fx.Node] = {}
        self.cells: dict[tuple[int, int], fx.Node] = {}
        self.splits: dict[int, fx.Node] = {}
        self.shared: dict[int, Any] = {}
        self.last_stage = len(self.layout.stages) - 1
        self._placeholders()
        self._begin()

    def _begin(self) -> None:
        for stage in range(len(self.layout.stages)):
            self._begin_stage(stage)

    def _begin_stage(self, stage: int) -> None:
        self._prologue(stage)
        if self.layout.stages[stage].inputs:
            self.splits[stage] = self._split(stage)
        if self.layout.stages[stage].shared:
            self.shared[stage] = self._shared(stage)

    def cells_and_end(self, order: Sequence[Entry]) -> None:
        """Add every entry in this order, the merges, the epilogue and the output."""
        self.last = max(entry.microbatch for entry in order if isinstance(entry, Action))
        for entry in order:
            if isinstance(entry, Receive):
                self._receive(entry.route)
            elif isinstance(entry, Send):
                self._send(entry.route)
            elif isinstance(entry, Action) and self.layout.stages[entry.stage].nodes:
                self._cell(entry.stage, entry.microbatch)
        for stage in self._giving():
            self._merge(stage, [self._item(self.cells[stage, m], OUT) for m in range(self.last + 1)])
        self._finish()

    def _call(self, function: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        return named(self.graph, self.graph.call_function(function, args), name)

    def _item(self, value: fx.Node, key: Any) -> fx.Node:
        return self.graph.call_function(operator.getitem, (value, key))

    def _placeholders(self) -> None:
        self.inputs = {
            node: named(self.graph, self.graph.placeholder(node.name), node.name)
            for node in self.lowered.traced.graph.nodes
            if node.op == "placeholder" and INFO in node.meta
        }
        self.rows = named(self.graph, self.graph.placeholder("rows"), "rows")
        names = (length.name for length in self.lowered.traced.lengths)
        self.lengths = {name: named(self.graph, self.graph.placeholder(name), name) for name in names}
        self.sizes, self.lanes, self.state = (
            named(self.graph, self.graph.placeholder(name), name) for name in ("sizes", "lanes", "state")
        )

    def _value(self, slot: Slot) -> fx.Node:
        """Return a value that the program holds; the uses of an input or a tied parameter are made at the first one."""
        if slot not in self.values:
            key, uses = slot.value, self.layout.given[slot.value]
            node = next((node for node in self.inputs if node.name == key), None)
            value = self.graph.get_attr(f"{STATE}.{key}") if node is None else self.inputs[node]
            if uses == 1 or (node is not None and node.meta[INFO].mutated):
                self.values.update({Slot(key, use): value for use in range(uses)})
            else:
                bundle = self._call(fork, (value, uses), f"{key.replace('.', '_')}_uses")
                self.values.update({Slot(key, use): self._item(bundle, use) for use in range(uses)})
        return self.values[slot]

    def _prologue(self, stage: int) -> None:
        module, prologue = self.lowered.prologues[stage], self.layout.prologues[stage]
        if module is None:
            return
        bundle = tuple(self._taken(slot, stage) for slot in prologue.takes)
        feeds: dict[str, Any] = {**self.lengths, "rows": self.rows, "shared": bundle}
        if "key" in module.takes:
            feeds["key"] = self._key(SHARED)
        out = self.graph.call_module(self.attributes[f"shared{stage}"], tuple(feeds[name] for name in module.takes))
        named(self.graph, out, f"shared{stage}_values")
        for position, slot in enumerate(prologue.gives):
            self.values[slot] = self._item(out, position)

    def _taken(self, slot: Slot, stage: int) -> fx.Node:
        """Return what a stage's shared nodes take."""
        return self._placed(slot, stage)

    def _key(self, microbatch: int) -> fx.Node:
        return self.graph.call_function(CellContext, (self.state, microbatch))

    def _home(self, slot: Slot, stage: int) -> int | None:
        """Return on which stage's device a value lies that a stage takes; None: on the caller's."""
        return self.layout.home.get(slot.value)

    def _placed(self, slot: Slot, stage: int) -> fx.Node:
        """Return a program-level value on a stage's device."""
        home, value = self._home(slot, stage), self._value(slot)
        if home == stage:
            return value
        source = self.lanes if home is None else home
        moved = self._transfer((value,), source, stage, f"{slot.value.replace('.', '_')}_on{stage}")
        return self._item(moved, 0)

    def _transfer(self, bundle: Any, source: Any, target: int, name: str, *done: fx.Node) -> fx.Node:
        lane = self._item(self.lanes, -1 if source is self.lanes else source)
        return self._call(transfer, (bundle, lane, self._item(self.lanes, target), *done), name)

    def _split(self, stage: int) -> fx.Node:
        slots = self.layout.stages[stage].inputs
        placeholders = {node.name: node for node in self.inputs}
        dims = tuple(placeholders[slot.value].meta[INFO].tensors[0].batch_dim for slot in slots)
        bundle = tuple(self._value(slot) for slot in slots)
        changed = tuple(placeholders[slot.value].meta[INFO].mutated for slot in slots)
        private = (changed,) if any(changed) else ()
        return self._call(split, (bundle, self.sizes, dims, self._item(self.lanes, stage), *private), f"inputs{stage}")

    def _shared(self, stage: int) -> Any:
        """Send a stage, once per step, the shared values and tied parameters that it uses: one transfer per source."""
        slots = self.layout.stages[stage].shared
        homes = [self._home(slot, stage) for slot in slots]
        if len(set(homes)) == 1 and homes[0] != stage:
            source = self.lanes if homes[0] is None else homes[0]
            return self._transfer(tuple(self._value(s) for s in slots), source, stage, f"given{stage}")
        return tuple(self._placed(slot, stage) for slot in slots)

    def _cell(self, stage: int, microbatch: int) -> None:
        layout, module = self.layout.stages[stage], self.lowered.stages[stage]
        feeds: dict[str, Any] = {**self.lengths, "shared": self.shared.get(stage)}
        if "rows" in module.takes:
            feeds["rows"] = self._item(self.sizes, microbatch)
        if "key" in module.takes:
            feeds["key"] = self._key(microbatch)
        if layout.inputs:
            feeds["inputs"] = self._item(self.splits[stage], microbatch)
        for source in layout.received:
            route = Route(source, stage, microbatch)
            feeds[f"from{source}"] = self.arrived.pop(route, None) or self._sent(route)
        flag: dict[str, Any] = {}
        if isinstance(self.lowered.runs[stage], Recomputed):
            flag["recompute"] = self.lowered.runs_again(stage, last=microbatch == self.last)
        args = tuple(feeds[name] for name in module.takes)
        cell = self.graph.call_module(self.attributes[f"stage{stage}"], args, flag)
        self.cells[stage, microbatch] = named(self.graph, cell, f"y{stage}_{microbatch}")

    def _sent(self, route: Route) -> fx.Node:
        return self._item(self.cells[route.source, route.microbatch], str(route.target))

    def _send(self, route: Route) -> None:
        """Record the event behind which what a cell sends is ready, once for all that it sends."""
        source, _, microbatch, *_ = route
        if (source, microbatch) not in self.done:
            name = f"done{source}_{microbatch}"
            self.done[source, microbatch] = self._call(record, (self._item(self.lanes, source),), name)

    def _receive(self, route: Route) -> None:
        source, target, microbatch, *_ = route
        name, done = f"y{source}_{microbatch}_on{target}", self.done[source, microbatch]
        self.arrived[route] = self._transfer(self._sent(route), source, target, name, done)

    def _giving(self) -> list[int]:
        """Return the stages that give the epilogue or the caller something."""
        return [stage for stage, layout in enumerate(self.layout.stages) if layout.sent.get(OUT)]

    def _merge(self, stage: int, bundles: Any) -> None:
        nodes = {n.name: n for n in self.lowered.traced.graph.nodes}
        slots = self.layout.stages[stage].sent[OUT]
        infos = [nodes[slot.value].meta[INFO].tensors[0] for slot in slots]
        layouts = tuple(info.layout if isinstance(info.layout, tuple) else None for info in infos)
        dims = tuple(info.batch_dim for info in infos)
        lane = self._item(self.lanes, stage)
        merged = self._call(merge, (bundles, dims, lane, *([layouts] if any(layouts) else [])), f"merged{stage}")
        for position, slot in enumerate(slots):
            self.values[Slot(slot.value)] = self._item(merged, position)

    def _finish(self) -> None:
        self.epilogue: dict[str, fx.Node] = {}
        module = self.lowered.epilogue
        if self.lowered.counts and self.lowered.epilogue_needs_counts:
            self._update()
        if module is not None:
            bundle = tuple(self._for_epilogue(slot, self.last_stage) for slot in self.lowered.epilogue_inputs)
            feeds: dict[str, Any] = {**self.lengths, "rows": self.rows, "values": bundle}
            if "key" in module.takes:
                feeds["key"] = self._key(ENDING)
            out = self.graph.call_module(self.attributes["epilogue"], tuple(feeds[name] for name in module.takes))
            named(self.graph, out, "epilogue_values")
            self.epilogue = {n: self._item(out, i) for i, n in enumerate(self.lowered.epilogue_outputs)}
        if self.lowered.counts and not self.lowered.epilogue_needs_counts:
            self._update()
        self.graph.output(tuple(self._output(value) for value in self.lowered.outputs))

    def _update(self) -> None:
        self._call(update_statistics, (self.state, self.lanes), "updated")

    def _for_epilogue(self, slot: Slot, last: int) -> fx.Node:
        if slot in self.values:
            home = self.layout.merged[slot.value]
            if home == last:
                return self.values[slot]
            moved = self._transfer((self.values[slot],), home, last, f"{slot.value}_on{last}")
            return self._item(moved, 0)
        return self._placed(self.layout.alias(slot.value, EPILOGUE), last)

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value.op == "get_attr":
            return self.graph.get_attr(f"{STATE}.{value.target}")
        if INFO not in value.meta:
            return self._size(value)
        if value.op == "placeholder":
            return self.inputs[value]
        if _from_beginning(value):
            return self._value(self.layout.alias(value.name, OUT))
        full = value.meta[INFO].node_class is NodeClass.FULL
        return self.epilogue[value.name] if full else self.values[Slot(value.name)]

    def _size(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self.lengths.get(node.meta.get(LENGTH, ""), self.rows)
        assert callable(node.target), "a size is an expression of operator functions"
        args = tuple(self._size(a) if isinstance(a, fx.Node) else a for a in node.args)
        return self.graph.call_function(node.target, args)
