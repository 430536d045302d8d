"""The code that runs a stage in a step: its graph as one Python function that looks nothing up.

    region    getattr(self.model.blocks, "0").norm1(x)     six lookups, and torch's checks for hooks
    code      norm1_7.forward(x)                           of a stand-in of the module

A stand-in of one of torch's layers shares the attributes of its module, and has its parameters and buffers in slots
that are filled before each call: with the model's, or with leaves whose ``.grad`` is the sum of a step. Everything else
is called as it is: layers with hooks or children, other classes, what keeps lists of its weights.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from autosplit.runtime.lower.region import ROOT, RegionModule
from autosplit.trace.borrowed.holders import HOOK_TABLES
from autosplit.trace.recording.recording import apply_function, under
from autosplit.trace.scope import has_module_hooks, is_called_as_torchs, is_plain_layer

_TABLES = ("_parameters", "_buffers")
_PLAIN = (bool, int, str, type(None), type(Ellipsis))
_NUMBERS = itertools.count()
_NOTE = "__note"
_PRODUCTS = (F.linear, F.conv1d, F.conv2d, F.conv3d, torch.addmm, torch.matmul, torch.mm)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class StageCode:
    """Runs a stage.

    Attributes:
        function: takes what the stage takes, and computes with what :meth:`fill` was given.
        is_entered: whether ``function`` is generated code; otherwise it is the ``run`` that was passed.
    """

    def __init__(self, region: RegionModule, run: Callable[..., Any]) -> None:
        """``run`` runs the stage: the ``region`` itself, or a wrapper that compiles or recomputes it."""
        self._slots: list[tuple[Callable[[Any], None], Mapping[str, Any], str]] = []
        """For each slot the function that fills it, and the table and name of its value in the model."""
        self._modules: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        """The modules on the way to what is called: the table of children, the name in it, and the module."""
        self._hooks: list[Mapping[Any, Any]] = []
        """Tables of hooks that are empty."""
        self._as_they_are: set[int] = set()
        """The ids of the modules that are called as modules, and of their submodules."""
        self._stood_for: list[nn.Module] = []
        self._attributes: list[tuple[str, ...]] = []
        """The modules that stand-ins stand for, and the names of their attributes then."""
        self.space: dict[str, Any] = {}
        """What the function names."""
        self.is_entered = run is region and not region.units and not has_module_hooks()
        self.function = _Writer(region, self).function() if self.is_entered else run
        slots = {(id(table), name) for _, table, name in self._slots}
        tables = [(vars(holder)[table], name, id(holder)) for _, table, name, holder in region.places()]
        self._others = [(t, n) for t, n, holder in tables if (id(t), n) not in slots or holder in self._as_they_are]
        """Where the model has parameters and buffers that the stage reads in other ways."""

    def holds(self) -> bool:
        """Tell whether it still does what the stage does: the modules are the same, and calls of them do no more."""
        same = all(table.get(name) is module for table, name, module in self._modules.values())
        if not same or any(self._hooks) or (self.is_entered and has_module_hooks()):
            return False
        kinds = set(map(type, self._stood_for))
        return [*map(tuple, map(vars, self._stood_for))] == self._attributes and all(map(is_called_as_torchs, kinds))

    def read(self) -> list[torch.Tensor | None]:
        """Return the model's parameters and buffers for the slots."""
        return [table[name] for _, table, name in self._slots]

    def others(self) -> list[torch.Tensor]:
        """Return the parameters and buffers that the stage reads in other ways than by slots."""
        return [tensor for table, name in self._others if (tensor := table[name]) is not None]

    def fill(self, tensors: Sequence[torch.Tensor | None], results: list[Any] | None = None) -> None:
        """Have calls compute with these from now on, and add autograd's nodes of layers' ``results`` to a list."""
        self.space[_NOTE] = _pass if results is None else lambda value: results.append(value.grad_fn)
        for (put, _, _), tensor in zip(self._slots, tensors, strict=True):
            put(tensor)

    def add_slot(self, put: Callable[[Any], None], table: Mapping[str, Any], name: str) -> None:
        """Add a slot for an entry of a table of a module."""
        self._slots.append((put, table, name))

    def module(self, root: nn.Module, path: str) -> nn.Module:
        """Return the module at a path."""
        for name in path.split(".") if path else ():
            table = root._modules if name in root._modules else vars(root)
            child: Any = table[name]
            self._modules[id(root), name] = table, name, child
            root = child
        return root

    def stand_in(self, module: nn.Module) -> nn.Module:
        """Return a stand-in of one of torch's layers; the module itself where there can be none."""
        attributes = vars(module)
        names = tuple(name for table in _TABLES for name in attributes[table])
        if not is_plain_layer(module):
            self._as_they_are.update(map(id, module.modules()))
            return module
        self._hooks += (attributes[table] for table in HOOK_TABLES)
        self._stood_for.append(module)
        self._attributes.append(tuple(attributes))
        kind = _stand_in_class(type(module), names)  # type: ignore[arg-type]
        stand: nn.Module = object.__new__(kind)
        object.__setattr__(stand, "__dict__", attributes)
        for table in _TABLES:
            for name in attributes[table]:
                self.add_slot(partial(vars(kind)[name].__set__, stand), attributes[table], name)
        return stand


@functools.cache
def _stand_in_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__slots__": names, "__module__": kind.__module__})


def _pass(value: Any) -> None:
    """Note nothing."""


def _is_product(called: Any) -> bool:
    """Tell whether what a stage calls makes a product of a weight, whose gradient may be put off."""
    return isinstance(called, _LAYERS) or any(called is product for product in _PRODUCTS)


def _is_users(node: fx.Node) -> bool:
    """Tell whether a call runs Python of the model, such as an autograd function: it sees the parameter itself."""
    called = node.args[1] if node.target is under else node.target
    return node.op == "call_function" and str(getattr(called, "__module__", None)).startswith(apply_function.__module__)


class _Writer:
    """Writes the function of a region."""

    def __init__(self, region: RegionModule, code: StageCode) -> None:
        self._region, self._code, self._space = region, code, code.space
        self._locals = {node.name for node in region.graph.nodes}
        self._names: dict[fx.Node, str] = {}
        self._layers: dict[str, nn.Module] = {}

    def function(self) -> Callable[..., Any]:
        """Return the function; tracebacks find its lines under a name like those that fx gives."""
        nodes = list(self._region.graph.nodes)
        last = {operand: node for node in nodes for operand in node.all_input_nodes}
        lines = [f"def forward({', '.join(self._region.takes)}):"]
        for node in nodes:
            if (text := self._line(node)) is not None:
                gone = [o.name for o in node.all_input_nodes if last[o] is node and self._names[o] == o.name]
                lines.append(f"    {text}" + (f"; del {', '.join(gone)}" if gone and node.op != "output" else ""))
        source, file = "\n".join(lines), f"<eval_with_key of a stage, {next(_NUMBERS)}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        exec(compile(source, file, "exec"), self._space)
        function: Callable[..., Any] = self._space["forward"]
        return function

    def _line(self, node: fx.Node) -> str | None:
        self._names[node] = node.name
        if node.op == "get_attr":
            self._names[node] = self._attribute(node)
        if node.op in ("placeholder", "get_attr"):
            return None
        args = [*map(self._text, node.args), *(f"{name}={self._text(value)}" for name, value in node.kwargs.items())]
        if node.op == "output":
            return f"return {args[0]}"
        if node.op == "call_method":
            return f"{node.name} = {args[0]}.{node.target}({', '.join(args[1:])})"
        if node.target is operator.getitem:
            return f"{node.name} = {args[0]}[{args[1]}]"
        called: Any = node.target
        text = ""
        if node.op == "call_module":
            path = called.removeprefix(f"{ROOT}.")
            called = self._layer(path)
            text = "" if called is self._code.module(self._region.root, path) else ".forward"
        note = f"; {_NOTE}({node.name})" if _is_product(called) else ""
        return f"{node.name} = {self._named(called)}{text}({', '.join(args)}){note}"

    def _layer(self, path: str) -> nn.Module:
        if path not in self._layers:
            self._layers[path] = self._code.stand_in(self._code.module(self._region.root, path))
        return self._layers[path]

    def _attribute(self, node: fx.Node) -> str:
        """Return the text for a value that the graph takes of the model, or of the region."""
        target = str(node.target)
        if not target.startswith(f"{ROOT}."):
            return self._named(vars(self._region)[target])
        path, _, name = target.removeprefix(f"{ROOT}.").rpartition(".")
        holder = self._code.module(self._region.root, path)
        if name in holder._modules:
            return self._named(self._layer(f"{path}.{name}".lstrip(".")))
        tables = (*(vars(holder)[table] for table in _TABLES), vars(holder))
        table = next((table for table in tables if isinstance(table.get(name), torch.Tensor)), None)
        if table is None or any(map(_is_users, node.users)):
            return f"getattr({self._named(holder)}, {name!r})"
        text = self._named(None, name)
        self._code.add_slot(partial(self._space.__setitem__, text), table, name)
        return text

    def _named(self, value: Any, hint: str = "") -> str:
        """Return a name under which the function finds a value."""
        hint = hint or getattr(value, "__name__", type(value).__name__)
        name = f"{re.sub(r'^(?=[0-9])|[^0-9a-zA-Z_]', '_', hint)}__{len(self._space)}"
        while name in self._locals:
            name += "_"
        self._space[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if type(value) in _PLAIN or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            text = "".join(f"{self._text(item)}, " for item in value)
            name = self._named(type(value)) if hasattr(value, "_fields") else ""
            return f"{name}({text})" if isinstance(value, tuple) else f"[{text}]"
        if isinstance(value, dict):
            return f"{{{''.join(f'{self._text(key)}: {self._text(item)}, ' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        return self._named(value)
