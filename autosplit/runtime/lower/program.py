"""The pipelined program: one fx graph that issues every cell of the step, in clock order.

clock        0      1      2      3          y<stage>_<microbatch>
stage 0    y0_0   y0_1   y0_2
stage 1           y1_0   y1_1   y1_2         each cell: transfer, call the stage, record

The order of cells is that of the plan's schedule; where a device holds several stages it takes turns with them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from autosplit.runtime.lower.layout import EPILOGUE, Slot
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.lower.text import readable
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import OUT, CellContext, fork, merge, record, split, transfer
from autosplit.runtime.regions import Recomputed
from autosplit.schedule.action import Action
from autosplit.trace.graph import INFO, LENGTH, NodeClass
from autosplit.trace.recording.build import named

STATE = "_model"


def emit(lowered: Lowered, *, order: Sequence[Action], attributes: Mapping[str, str]) -> fx.Graph:
    """Emit the program for forwards in an order in which they can be issued.

    ``attributes`` maps ``stage0``, ``shared0``, ``epilogue`` to the attribute names under which the modules will lie.
    """
    program = _Program(lowered, attributes)
    program.cells_and_end(order)
    readable(program.graph)
    return program.graph


def emit_setup(lowered: Lowered, parts: Mapping[str, nn.Module]) -> fx.GraphModule:
    """Emit what happens once per step before the first cell, as a GraphModule of its own.

    It returns ``(inputs, shared, kept)``: per stage the microbatches of its inputs, its shared bundle, and the values
    that :func:`emit_ending` takes from here. ``parts`` are the modules of the program, on their lanes.
    """
    program = _Program(lowered, {name: name for name in parts})
    kept = tuple(program.values[slot] for slot in ending_slots(lowered))
    program.graph.output((program.splits, program.shared, kept))  # type: ignore[arg-type]
    return _module(lowered, parts, program.graph)


def emit_ending(lowered: Lowered, parts: Mapping[str, nn.Module]) -> fx.GraphModule:
    """Emit what happens once per step behind the last cell: the merges and the epilogue; it returns the flat outputs.

    It takes the program's own inputs, then ``kept`` of :func:`emit_setup`, then ``bundles``: per stage that gives the
    caller something, what it gave for each microbatch.
    """
    return _module(lowered, parts, _Ending(lowered, {name: name for name in parts}).graph)


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


def _module(lowered: Lowered, parts: Mapping[str, nn.Module], graph: fx.Graph) -> fx.GraphModule:
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module.__dict__[STATE] = lowered.traced.root
    module.__dict__.update(parts)
    module.graph = graph
    return module


class _Program:
    def __init__(self, lowered: Lowered, attributes: Mapping[str, str]) -> None:
        self.lowered = lowered
        self.layout = lowered.layout
        self.attributes = attributes
        self.graph = fx.Graph()
        self.values: dict[Slot, fx.Node] = {}
        self.done: dict[tuple[int, int], fx.Node] = {}
        self.cells: dict[tuple[int, int], fx.Node] = {}
        self._placeholders()
        self._begin()

    def _begin(self) -> None:
        self._given()
        self._prologues()
        self.splits = {s: self._split(s) for s, stage in enumerate(self.layout.stages) if stage.inputs}
        self.shared = {s: self._shared(s) for s, stage in enumerate(self.layout.stages) if stage.shared}

    def cells_and_end(self, order: Sequence[Action]) -> None:
        """Add every cell in this order, the merges, the epilogue and the output."""
        self.last = max(action.microbatch for action in order)
        for action in order:
            if self.layout.stages[action.stage].nodes:
                self._cell(action.stage, action.microbatch)
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

    def _given(self) -> None:
        by_name: dict[str, fx.Node] = {node.name: new for node, new in self.inputs.items()}
        for key, uses in self.layout.given.items():
            if key not in by_name:
                by_name[key] = self.graph.get_attr(f"{STATE}.{key}")
            value = by_name[key]
            if uses == 1:
                self.values[Slot(key, 0)] = value
            elif uses and any(node.name == key and node.meta[INFO].mutated for node in self.inputs):
                self.values.update({Slot(key, use): value for use in range(uses)})
            elif uses:
                bundle = self._call(fork, (value, uses), f"{key.replace('.', '_')}_uses")
                for use in range(uses):
                    self.values[Slot(key, use)] = self._item(bundle, use)

    def _prologues(self) -> None:
        for stage, module in enumerate(self.lowered.prologues):
            if module is None:
                continue
            prologue = self.layout.prologues[stage]
            bundle = tuple(self._placed(slot, stage) for slot in prologue.takes)
            feeds: dict[str, Any] = {**self.lengths, "rows": self.rows, "shared": bundle}
            if "key" in module.takes:
                feeds["key"] = self._key(-1)
            out = self.graph.call_module(self.attributes[f"shared{stage}"], tuple(feeds[name] for name in module.takes))
            named(self.graph, out, f"shared{stage}_values")
            for position, slot in enumerate(prologue.gives):
                self.values[slot] = self._item(out, position)

    def _key(self, microbatch: int) -> fx.Node:
        return self.graph.call_function(CellContext, (self.state, microbatch))

    def _home(self, slot: Slot) -> int | None:
        return self.layout.home.get(slot.value)

    def _placed(self, slot: Slot, stage: int) -> fx.Node:
        """Return a program-level value on a stage's device."""
        home = self._home(slot)
        if home == stage:
            return self.values[slot]
        source = self.lanes if home is None else home
        moved = self._transfer((self.values[slot],), source, stage, f"{self.values[slot].name}_on{stage}")
        return self._item(moved, 0)

    def _transfer(self, bundle: Any, source: Any, target: int, name: str, *done: fx.Node) -> fx.Node:
        lane = self._item(self.lanes, -1 if source is self.lanes else source)
        return self._call(transfer, (bundle, lane, self._item(self.lanes, target), *done), name)

    def _split(self, stage: int) -> fx.Node:
        slots = self.layout.stages[stage].inputs
        placeholders = {node.name: node for node in self.inputs}
        dims = tuple(placeholders[slot.value].meta[INFO].tensors[0].batch_dim for slot in slots)
        bundle = tuple(self.values[slot] for slot in slots)
        changed = tuple(placeholders[slot.value].meta[INFO].mutated for slot in slots)
        private = (changed,) if any(changed) else ()
        return self._call(split, (bundle, self.sizes, dims, self._item(self.lanes, stage), *private), f"inputs{stage}")

    def _shared(self, stage: int) -> fx.Node:
        """Send a stage, once per step, the shared values and tied parameters that it uses: one transfer per source."""
        slots = self.layout.stages[stage].shared
        homes = [self._home(slot) for slot in slots]
        if len(set(homes)) == 1 and homes[0] != stage:
            source = self.lanes if homes[0] is None else homes[0]
            return self._transfer(tuple(self.values[s] for s in slots), source, stage, f"given{stage}")
        return tuple(self._placed(slot, stage) for slot in slots)  # type: ignore[return-value]

    def _cell(self, stage: int, microbatch: int) -> None:
        layout, module = self.layout.stages[stage], self.lowered.stages[stage]
        feeds: dict[str, Any] = {**self.lengths, "shared": self.shared.get(stage)}
        if "rows" in module.takes:
            feeds["rows"] = self._item(self.sizes, microbatch)
        if "key" in module.takes:
            feeds["key"] = self._key(microbatch)
        if layout.inputs:
            feeds["inputs"] = self._item(self.splits[stage], microbatch)
        for source in sorted(layout.received):
            bundle = self._item(self.cells[source, microbatch], str(stage))
            name = f"y{source}_{microbatch}_on{stage}"
            feeds[f"from{source}"] = self._transfer(bundle, source, stage, name, self.done[source, microbatch])
        flag: dict[str, Any] = {}
        if isinstance(self.lowered.runs[stage], Recomputed):
            flag["recompute"] = self.lowered.runs_again(stage, last=microbatch == self.last)
        args = tuple(feeds[name] for name in module.takes)
        cell = self.graph.call_module(self.attributes[f"stage{stage}"], args, flag)
        self.cells[stage, microbatch] = named(self.graph, cell, f"y{stage}_{microbatch}")
        if set(layout.sent) - {OUT}:
            lane = self._item(self.lanes, stage)
            self.done[stage, microbatch] = self._call(record, (lane,), f"done{stage}_{microbatch}")

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
            last = len(self.lowered.stages) - 1
            bundle = tuple(self._for_epilogue(slot, last) for slot in self.lowered.epilogue_inputs)
            feeds: dict[str, Any] = {**self.lengths, "rows": self.rows, "values": bundle}
            if "key" in module.takes:
                feeds["key"] = self._key(-2)
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
            return self.values[self.layout.alias(value.name, OUT)]
        full = value.meta[INFO].node_class is NodeClass.FULL
        return self.epilogue[value.name] if full else self.values[Slot(value.name)]

    def _size(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self.lengths.get(node.meta.get(LENGTH, ""), self.rows)
        assert callable(node.target), "a size is an expression of operator functions"
        args = tuple(self._size(a) if isinstance(a, fx.Node) else a for a in node.args)
        return self.graph.call_function(node.target, args)


class _Ending(_Program):
    """The end of a program alone: what came before lies in two bundles."""

    def _begin(self) -> None:
        kept, bundles = (named(self.graph, self.graph.placeholder(n), n) for n in ("kept", "bundles"))
        self.values.update({slot: self._item(kept, i) for i, slot in enumerate(ending_slots(self.lowered))})
        for stage in self._giving():
            self._merge(stage, self._item(bundles, stage))
        self._finish()
