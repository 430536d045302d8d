"""Copy a set of recorded nodes into a graph of their own: the common part of stages, prologues and the epilogue."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autosplit.runtime.lower.layout import Layout, Slot
from autosplit.runtime.lower.uses import takes_once
from autosplit.runtime.norms import normalise, tally
from autosplit.runtime.ops import alias, draw, fork
from autosplit.runtime.regions import Compiled, Recomputed
from autosplit.trace.graph import INFO, LENGTH
from autosplit.trace.recording.build import named
from autosplit.trace.recording.recording import under
from autosplit.trace.rows.kinds import counts_by_microbatch, keeps_statistics

ROOT = "model"


class StatePlace(NamedTuple):
    """Where a parameter or buffer is: a module's path, which of its tables, the name in that, and the module."""

    path: str
    table: str
    name: str
    holder: nn.Module


class Region:
    """A graph under construction: recorded nodes go in by :meth:`copy`, outside values by :meth:`bind`."""

    def __init__(self, layout: Layout, device: torch.device, *, compiled: Mapping[str, Any] | None = None) -> None:
        self.compiled = compiled
        self.layout = layout
        self.traced = layout.traced
        self.device = device
        self.graph = fx.Graph()
        self.rows = self.graph.placeholder("rows")
        self.key = self.graph.placeholder("key")
        self.lengths = {length.name: self.graph.placeholder(length.name) for length in self.traced.lengths}
        self.slots: dict[Slot, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.functions: dict[str, Any] = {}
        self.units: list[tuple[str, tuple[fx.Node, ...]]] = []
        """Recorded nodes that follow each other and are recomputed as one unit, behind the unit's name."""
        self.emitted: dict[fx.Node, list[fx.Node]] = {}
        """For each recorded node its nodes in this graph: the copy, and the aliases and forks that it alone uses."""

    def bind(self, name: str, slots: Iterable[Slot], names: Mapping[str, str]) -> None:
        """Add a placeholder for a bundle and unpack it."""
        bundle = self.graph.placeholder(name)
        for position, slot in enumerate(slots):
            label = names[slot.value] if slot.use is None else f"{names[slot.value]}_use{slot.use}"
            node = self.graph.call_function(operator.getitem, (bundle, position))
            self.slots[slot] = named(self.graph, node, label)

    def copy(self, nodes: Iterable[fx.Node]) -> None:
        """Copy recorded nodes in model order."""
        changed = []
        for node in nodes:
            before = next(iter(reversed(self.graph.nodes)))
            self._copy(node)
            key = node.name
            forks = key in self.layout.forked or (key in self.layout.home and self.layout.uses[key] > 1)
            if forks and self.layout.uses[key] > 1:
                if INFO in node.meta and node.meta[INFO].mutated:
                    changed.append(node)  # its history is whole behind its last change in place
                else:
                    self._fork(node, self.layout.uses[key])
            self.emitted[node] = _behind(before)
        for node in changed:
            self._fork(node, self.layout.uses[node.name])

    def copy_units(self, pieces: Iterable[tuple[str, Sequence[fx.Node]]], *, label: str) -> None:
        """Copy recorded nodes in model order; the nodes of every piece that has a path will run again as one."""
        nodes: list[fx.Node] = []
        for path, piece in pieces:
            nodes += piece
            if path:
                self.units.append((f"{path!r} of {label}", tuple(piece)))
        self.copy(nodes)

    def value(self, slot: Slot) -> fx.Node:
        """Return the node for a slot that the region gives."""
        if slot in self.slots:
            return self.slots[slot]
        copy = next((copy for node, copy in self.copies.items() if node.name == slot.value), None)
        return copy if copy is not None else next(node for key, node in self.slots.items() if key.value == slot.value)

    def _fork(self, node: fx.Node, uses: int) -> None:
        bundle = named(self.graph, self.graph.call_function(fork, (self.copies[node], uses)), f"{node.name}_uses")
        for use in range(uses):
            self.slots[Slot(node.name, use)] = self.graph.call_function(operator.getitem, (bundle, use))

    def _copy(self, node: fx.Node) -> None:
        env: dict[fx.Node, fx.Node] = {}
        for operand in node.all_input_nodes:
            env[operand] = self._operand(operand, node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = self._placed(node, args, kwargs)
        info = node.meta.get(INFO)
        if info is not None and info.random:
            new = self._call(draw, node, args, kwargs)
        elif info is not None and counts_by_microbatch(node):  # put aside until all microbatches were there
            new = self._call(normalise if keeps_statistics(node, self.traced.root) else tally, node, args, kwargs)
        elif node.op == "call_module":
            new = self.graph.call_module(f"{ROOT}.{node.target}", args, kwargs)
        else:
            new = self.graph.create_node(node.op, node.target, args, kwargs)
        self.copies[node] = named(self.graph, new, node.name)

    def _call(self, word: Callable[..., Any], node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """Copy a call as a call of ``word``, a runtime function taking the cell, the call's name, and the callee."""
        name = node.meta[INFO].name
        if node.target is under:
            ambient, function, *args = args
            arguments = (ambient, self._held(word.__name__, word), self.key, name, function, *args)
            return self.graph.call_function(under, arguments, kwargs)
        if node.op == "call_module":
            function = self.graph.get_attr(f"{ROOT}.{node.target}")
        else:
            target = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            function = self._held(f"{word.__name__}_{node.name}", target)
        return self.graph.call_function(word, (self.key, name, function, *args), kwargs)

    def _held(self, name: str, function: Any) -> fx.Node:
        self.functions[name] = function
        return self.graph.get_attr(name)

    def _operand(self, operand: fx.Node, consumer: fx.Node) -> fx.Node:
        if operand.op == "get_attr":
            use = self.layout.alias_of.get((str(operand.target), consumer.name))
            if use is not None:
                return self.slots[Slot(str(operand.target), use)]
            epilogue = self.slots.get(Slot(str(operand.target), None))
            return epilogue if epilogue is not None else self.graph.get_attr(f"{ROOT}.{operand.target}")
        if operand.op == "placeholder" and INFO not in operand.meta:
            return self.lengths.get(operand.meta.get(LENGTH, ""), self.rows)
        if INFO not in operand.meta:
            return self._plumbing(operand, consumer)
        use = self.layout.alias_of.get((operand.name, consumer.name))
        if use is not None and Slot(operand.name, use) in self.slots:
            return self.slots[Slot(operand.name, use)]
        value = self.slots.get(Slot(operand.name, None), self.copies.get(operand))
        assert value is not None, f"{operand.name} is not at hand for {consumer.name}"
        return self._alias(value, operand, consumer)

    def _plumbing(self, operand: fx.Node, consumer: fx.Node) -> fx.Node:
        """Copy a size expression (or a step into a structured result) to where it is used."""
        if operand in self.copies:
            return self.copies[operand]
        env = {n: self._operand(n, consumer) for n in operand.all_input_nodes}
        copy = self.graph.node_copy(operand, env.__getitem__)
        copy.meta.clear()
        self.copies[operand] = copy
        return copy

    def _alias(self, value: fx.Node, operand: fx.Node, consumer: fx.Node) -> fx.Node:
        info = operand.meta[INFO]
        if self.layout.uses.get(operand.name, 0) < 2 or info.mutated or len(info.tensors) != 1:
            return value
        if not info.tensors[0].differentiable or takes_once(consumer, operand, self.traced.root):
            return value
        return self.graph.call_function(alias, (value,))

    def _placed(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace devices that the recording names by the region's device; on the CPU, meta stays meta."""
        on_cpu = self.device.type == "cpu"

        def moved(value: Any) -> Any:
            moves = isinstance(value, torch.device) and not (on_cpu and value.type == "meta")
            return self.device if moves else value

        args, kwargs = fx.node.map_aggregate((args, kwargs), moved)
        if on_cpu:
            return args, kwargs
        constructors = torch.utils._device._device_constructors()
        target = args[1] if node.target is under and len(args) > 1 else node.target
        if target in constructors and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        return args, kwargs

    def finish(self, output: Any, kind: str) -> RegionModule:
        """Close the graph and return it as a GraphModule that reads the model's own state by name."""
        self.graph.output(output)
        for node in (self.key, self.rows, *self.lengths.values()):
            if not node.users:
                self.graph.erase_node(node)
        units = {f"unit{number}": self._taken_out(*unit, number) for number, unit in enumerate(self.units)}
        return self._module(self.graph, kind, units)

    def _module(
        self, graph: fx.Graph, kind: str, units: Mapping[str, Recomputed] = MappingProxyType({})
    ) -> RegionModule:
        module = RegionModule(nn.Module(), fx.Graph(), kind)
        module.__dict__[ROOT] = self.traced.root
        module.__dict__.update(self.functions)
        module.__dict__.update(units)
        module.__dict__["units"] = tuple(units)
        module.training = self.traced.root.training
        module.graph = graph
        return module

    def _taken_out(self, label: str, nodes: tuple[fx.Node, ...], number: int) -> Recomputed:
        """Replace the nodes of a unit by a call of it."""
        copies = [copy for node in nodes for copy in self.emitted[node]]
        region = self._module(take_out(self.graph, copies, attribute=f"unit{number}"), f"Unit{number}")
        run = None if self.compiled is None else Compiled(region, label, self.compiled)
        return recomputed(region, self.layout, nodes, label=label, run=run)


class RegionModule(fx.GraphModule):
    """A piece of the model as a graph; its state is the model's own and is not registered here a second time."""

    units: tuple[str, ...] = ()
    """The attributes that hold its units, which are recomputed in the backward."""

    def recompile(self) -> Any:
        """Compile the graph; a call goes straight to it, so that an exception keeps its own traceback."""
        code = super().recompile()
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of the graph's inputs, in order."""
        return tuple(node.name for node in self.graph.nodes if node.op == "placeholder")

    @property
    def root(self) -> nn.Module:
        """The model's own state."""
        root: nn.Module = self.__dict__[ROOT]
        return root

    def named(self) -> Iterator[tuple[fx.Node, str]]:
        """Yield the graph's nodes, also those that run again as one, and what they name of the model, if anything."""
        for node in self.graph.nodes:
            target = str(node.target)
            named = node.op in ("call_module", "get_attr") and target.startswith(f"{ROOT}.")
            yield node, target.removeprefix(f"{ROOT}.") if named else ""
            if node.op == "call_module" and target in self.units:
                yield from self.__dict__[target].region.named()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters that the graph uses, by their names in the model, each once."""
        return self._each_once("parameters")

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Return the buffers that the graph uses, by their names in the model, each once."""
        return self._each_once("buffers")

    def leaves(self) -> list[torch.Tensor]:
        """Return the parameters and buffers that the graph uses and that require a gradient, each once."""
        return [tensor for _, tensor in self._each_once("parameters", "buffers") if tensor.requires_grad]

    def places(self) -> Iterator[StatePlace]:
        """Yield where the parameters and buffers are that the graph uses."""
        for full, _ in self._state("parameters", "buffers"):
            path, _, name = full.rpartition(".")
            mod = self.root.get_submodule(path)
            yield from (StatePlace(path, t, name, mod) for t in ("_parameters", "_buffers") if name in getattr(mod, t))

    def _each_once(self, *kinds: str) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, tensor in self._state(*kinds):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def used(self) -> dict[str, nn.Module | torch.Tensor]:
        """Return the modules that the graph calls, with their children, and the tensors that it takes, by path."""
        used: dict[str, nn.Module | torch.Tensor] = {}
        for path in dict.fromkeys(path for _, path in self.named() if path):
            parent, _, name = path.rpartition(".")
            holder = self.root.get_submodule(parent)
            if (module := holder._modules.get(name)) is not None:
                used |= dict(module.named_modules(prefix=path))
            elif isinstance(value := getattr(holder, name, None), torch.Tensor):
                used[path] = value
        return used

    def _state(self, *kinds: str) -> Iterator[tuple[str, torch.Tensor]]:
        for path, value in self.used().items():
            if isinstance(value, nn.Module):
                tables = (getattr(value, "_" + kind) for kind in kinds)
                yield from ((f"{path}.{n}", t) for table in tables for n, t in table.items() if t is not None)
                continue
            parent, _, name = path.rpartition(".")
            holder = self.root.get_submodule(parent)
            free = name in vars(holder) and value.requires_grad  # a leaf that the model holds without registering it
            if any(name in getattr(holder, "_" + kind) for kind in kinds) or ("parameters" in kinds and free):
                yield path, value


def recomputed(
    region: RegionModule,
    layout: Layout,
    nodes: Iterable[fx.Node],
    *,
    copied: Sequence[int] = (),
    label: str,
    run: Compiled | None,
) -> Recomputed:
    """Return what runs recorded ``nodes``, which ``region`` holds, so that they run again in the backward."""
    infos = [node.meta[INFO] for node in nodes if INFO in node.meta]
    writes = {name for info in infos for name in info.writes}
    traced = layout.traced
    aliased = dict.fromkeys(name for _, info in traced.compute_nodes() for name in info.rewritten)
    return Recomputed(
        region,
        traced.root,
        rewritten={name: name in writes for info in infos for name in info.rewritten},
        aliased=tuple(aliased),
        written=traced.written,
        copied=copied,
        label=label,
        run=run,
    )


def _behind(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a graph behind ``node``."""
    nodes = []
    while (node := node.next).op != "root":
        nodes.append(node)
    return nodes


def take_out(graph: fx.Graph, nodes: Sequence[fx.Node], *, attribute: str) -> fx.Graph:
    """Move nodes that follow each other into a graph of their own, which the module ``attribute`` is to run.

    What the new graph returns, a tuple, is taken apart where the nodes were.
    """
    moved = set(nodes)
    taken = list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in moved))
    results = [node for node in nodes if not moved.issuperset(node.users)]
    inside = fx.Graph()
    copies = {operand: inside.placeholder(operand.name) for operand in taken}
    for node in nodes:
        copies[node] = inside.node_copy(node, copies.__getitem__)
    inside.output(tuple(copies[node] for node in results))
    with graph.inserting_before(nodes[0]):
        call = graph.call_module(attribute, tuple(taken))
        for index, node in enumerate(results):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (call, index)))
    for node in reversed(nodes):
        graph.erase_node(node)
    return inside
