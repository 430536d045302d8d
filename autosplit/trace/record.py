"""Run a model once on fake tensors and write down every torch-level call.

    model's own Python ──► Module.__call__ (patched)  leaf: one call, muted inside; other modules: entered
                      ──► TorchFunctionMode          every torch function and Tensor method
                      ──► TorchDispatchMode          which of them draw random numbers
                      ──► FakeTensorMode             shapes only: nothing is computed or allocated

Values are known by identity: every tensor that a call returned is kept alive until the recording ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from autosplit.errors import TraceError
from autosplit.trace.calls import Ambient, apply_function, assign_buffer, under
from autosplit.trace.random_watch import RandomWatch
from autosplit.trace.structure import Field, flatten_output, projections, tensors_in

VALUE_READS = frozenset(
    "__bool__ item tolist __int__ __float__ __index__ __complex__ numpy __array__ is_nonzero equal allclose "
    "__contains__".split()
)
GRADIENT_CALLS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "backward", "grad"))
CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
STATEFUL_LEAVES = (nn.modules.batchnorm._NormBase,)


@dataclasses.dataclass(frozen=True)
class Ref:
    """The result of the recorded call with this index."""

    index: int


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A parameter, buffer, module or constant by its name."""

    name: str


@dataclasses.dataclass
class Call:
    """One recorded call; ``kind`` is input, module, function or project."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    name: str
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    dtypes: list[torch.dtype] = dataclasses.field(default_factory=list)
    reads: list[str] = dataclasses.field(default_factory=list)
    writes: list[str] = dataclasses.field(default_factory=list)
    leaf: str | None = None
    """The leaf module that the call runs, also when it is wrapped in an ambient state."""
    random: bool = False
    mutates: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the storages that this call changes in place."""
    storages: list[int] = dataclasses.field(default_factory=list)
    reads_storages: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Recording:
    """All calls of one run, the constants that they use and the model's output."""

    calls: list[Call]
    constants: dict[str, Any]
    output: list[Any]
    unflatten: Callable[[list[Any]], Any]


class Recorder(TorchFunctionMode):
    """Records torch-level calls of one forward; modules in ``entered`` are never leaves, ``hooks`` fire on leaves."""

    def __init__(self, model: nn.Module, entered: frozenset[str], *, hooks: bool = True) -> None:
        super().__init__()
        self.hooks = hooks
        self.model = model
        self.entered = entered
        self.calls: list[Call] = []
        self.constants: dict[str, Any] = {}
        self.random = RandomWatch()
        self._refs: dict[int, int] = {}
        self._attributes: dict[int, str] = {}
        self._keep: list[Any] = []
        self._muted = 0
        self._stack: list[tuple[str, int]] = [("", 0)]
        self._module_calls: Counter[str] = Counter()
        self._op_counts: Counter[tuple[str, int, str]] = Counter()
        self._storages: dict[int, int] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._root_ambient = Ambient.current()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._attributes.setdefault(id(tensor), name)
            self._keep.append(tensor)
            self._storages.setdefault(tensor.untyped_storage()._cdata, -1)
        self._buffers = {name: (b, b._version) for name, b in model.named_buffers()}

    @property
    def path(self) -> str:
        """Qualified name of the module whose forward is running."""
        return self._stack[-1][0]

    # -- values ------------------------------------------------------------------------------------------------
    def add_input(self, name: str, tensor: torch.Tensor) -> None:
        """Bind an input tensor."""
        call = Call("input", name, (), {}, "", f"input/{name}")
        self.calls.append(call)
        self._note(call, tensor)
        self._refs[id(tensor)] = len(self.calls) - 1

    def reference(self, tensor: torch.Tensor) -> Ref | Attribute:
        """Return the recorded call or the attribute that a tensor is."""
        if id(tensor) in self._refs:
            return Ref(self._refs[id(tensor)])
        if id(tensor) in self._attributes:
            return Attribute(self._attributes[id(tensor)])
        if tensor.requires_grad and not tensor.is_leaf:
            raise TraceError(
                f"a tensor with gradient history entered {_where(self.path)} from outside the recorded calls "
                f"({type(tensor.grad_fn).__name__}); pass it as an input of the model"
            )
        if isinstance(tensor, FakeTensor):
            raise TraceError(
                f"{_where(self.path)} makes a tensor in a way that cannot be recorded; use a torch function such as "
                "torch.tensor, torch.zeros or torch.arange"
            )
        return self.constant(tensor)

    def constant(self, value: Any) -> Attribute:
        """Bind any object that the graph must carry as a constant."""
        if id(value) not in self._attributes:
            prefix = "_constant" if isinstance(value, torch.Tensor) else "_object"
            self._attributes[id(value)] = f"{prefix}{len(self.constants)}"
            self.constants[self._attributes[id(value)]] = value
            self._keep.append(value)
        return Attribute(self._attributes[id(value)])

    def encode(self, value: Any) -> Any:
        """Replace tensors in nested arguments by what they are in the recording."""
        if isinstance(value, torch.Tensor):
            return self.reference(value)
        if isinstance(value, nn.Module) and id(value) in self._paths:
            return Attribute(self._paths[id(value)])
        if isinstance(value, slice):
            return slice(self.encode(value.start), self.encode(value.stop), self.encode(value.step))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.encode(v) for v in value))
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(self.encode(v) for v in value)
        if isinstance(value, dict):
            return {key: self.encode(v) for key, v in value.items()}
        if isinstance(value, _PLAIN) or value is None or value is Ellipsis:
            return value
        return self.constant(value)

    def _note(self, call: Call, tensor: torch.Tensor) -> None:
        call.shapes.append(tuple(tensor.shape))
        call.dtypes.append(tensor.dtype)
        call.storages.append(self._storages.setdefault(tensor.untyped_storage()._cdata, len(self._storages)))
        self._keep.append(tensor)

    # -- calls -------------------------------------------------------------------------------------------------
    def perform(self, kind: str, target: Any, label: str, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run one call and write it down; nothing inside is recorded."""
        self._muted += 1
        try:
            inputs = tensors_in((args, kwargs))
            if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
                raise TraceError(
                    f"{_where(self.path)} draws from a generator of its own; a pipeline cannot keep the order of its "
                    "draws: use torch's default generator"
                )
            versions = [t._version for t in inputs]
            call = Call(kind, target, self.encode(tuple(args)), self.encode(dict(kwargs)), self.path, "")
            call.leaf = target if kind == "module" else None
            self.random.drew = False
            out = run()
            call.random = self.random.drew
            ambient = Ambient.current()
            if ambient != self._root_ambient:
                self._wrap(call, ambient.differing(self._root_ambient))
            self._track_mutation(call, inputs, versions)
            self._track_state(call, inputs)
            tensors = [t for t in flatten_output(out)[0] if isinstance(t, torch.Tensor)]
            if tensors or call.mutates or call.writes:
                call.name = self._name(kind, label)
                self.calls.append(call)
                self._bind(out, len(self.calls) - 1)
            return out
        finally:
            self._muted -= 1

    def _name(self, kind: str, label: str) -> str:
        path, number = self._stack[-1]
        if kind == "module":
            return f"{path}#{number}"
        count = self._op_counts[path, number, label]
        self._op_counts[path, number, label] += 1
        return f"{path}#{number}/{label}_{count}"

    def _wrap(self, call: Call, ambient: Ambient) -> None:
        function = Attribute(call.target) if call.kind == "module" else self.constant(call.target)
        call.kind, call.target = "function", under
        call.args = (self.constant(ambient), function, *call.args)

    def _track_mutation(self, call: Call, inputs: list[torch.Tensor], versions: list[int]) -> None:
        for tensor, version in zip(inputs, versions, strict=True):
            storage = self._storages.get(tensor.untyped_storage()._cdata, -1)
            if tensor._version != version and self._attributes.get(id(tensor), "") in self.constants:
                raise TraceError(
                    f"{_where(self.path)} changes a tensor in place that is a plain attribute; a graph would hold its "
                    "own: register it as a buffer"
                )
            if storage >= 0:
                call.reads_storages.append(storage)
                if tensor._version != version:
                    call.mutates.append(storage)

    def _track_state(self, call: Call, inputs: list[torch.Tensor]) -> None:
        call.reads += [n for t in inputs if (n := self._attributes.get(id(t))) and n not in self.constants]
        module = None if call.leaf is None else self.model.get_submodule(call.leaf)
        if module is not None:
            call.reads += [self._attributes[id(t)] for t in (*module.parameters(), *module.buffers())]
        for name, (buffer, version) in self._buffers.items():
            if buffer._version != version:
                call.writes.append(name)
                self._buffers[name] = (buffer, buffer._version)
        if isinstance(module, STATEFUL_LEAVES) and module.training and module.track_running_stats:
            own = {self._attributes[id(b)] for b in module.buffers()}
            call.writes += sorted(own - set(call.writes))
        elif call.target in _STATISTICS and _is_training(call):
            own = {name for name in self._buffers if name in call.reads}
            call.writes += sorted(own - set(call.writes))

    def _bind(self, out: Any, index: int) -> None:
        if isinstance(out, torch.Tensor):
            self._note(self.calls[index], out)
            self._refs[id(out)] = index
            return
        for leaf, steps in projections(out):
            self._note(self.calls[index], leaf)
            parent = Ref(index)
            base = self.calls[index].name
            for step in steps:
                base = f"{base}.{step}"
                call = Call("project", "attribute" if isinstance(step, Field) else "item", (parent, step), {}, "", base)
                call.module = self.calls[index].module
                self.calls.append(call)
                parent = Ref(len(self.calls) - 1)
            self._note(self.calls[-1], leaf)
            self._refs[id(leaf)] = parent.index

    # -- the two seams -------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        label = getattr(func, "__name__", type(func).__name__)
        if label in VALUE_READS and any(id(t) in self._refs for t in tensors_in((args, kwargs))):
            raise TraceError(
                f"{_where(self.path)} reads a tensor's value in Python ({label}); a graph cannot follow that. Compute "
                "the choice with torch.where, or move it out of forward"
            )
        if label in GRADIENT_CALLS and any(id(t) in self._refs for t in tensors_in((args, kwargs))):
            raise TraceError(
                f"{_where(self.path)} calls {label} on a recorded tensor; a graph carries no hooks and computes no "
                "gradients inside forward"
            )
        if label == "__get__":
            label = func.__self__.__name__
            if label == "grad":
                return func(*args, **kwargs)
            return self.perform("function", getattr, label, lambda: func(*args), (args[0], label), {})
        if label == "__set__":
            label = func.__self__.__name__
            full = (args[0], label, args[1])
            return self.perform("function", setattr, f"set_{label}", lambda: func(*args), full, {})
        return self.perform("function", func, label.strip("_") or "op", lambda: func(*args, **kwargs), args, kwargs)

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__``: a leaf is one call, anything else is entered."""
        path = self._paths.get(id(module))
        if self._muted or path is None:
            return original(module, *args, **kwargs)
        if path == "":
            return module.forward(*args, **kwargs)
        self._stack.append((path, self._module_calls[path]))
        self._module_calls[path] += 1
        try:
            if self.is_leaf(module, path):
                return self._leaf(original, module, path, args, kwargs)
            return original(module, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, TraceError) and not getattr(error, "__notes__", None):
                error.add_note(f"raised in module {path!r} ({type(module).__name__})")
            raise
        finally:
            self._stack.pop()

    def _leaf(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        cumulative = isinstance(module, STATEFUL_LEAVES) and module.momentum is None
        if cumulative:  # torch reads 1 / float(num_batches_tracked) then, which a fake tensor cannot tell
            module.__dict__["momentum"] = 0.1
        try:
            run = partial(original, module) if self.hooks else module.forward
            return self.perform("module", path, "", lambda: run(*args, **kwargs), args, kwargs)
        finally:
            if cumulative:
                module.__dict__["momentum"] = None

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """Tell whether a module is recorded as one call: torch.nn layers, and containers that carry hooks."""
        if path in self.entered:
            return False
        home = type(module).__module__
        layer = home.startswith("torch.nn") and not home.startswith("torch.nn.utils")
        return (layer and not isinstance(module, CONTAINERS)) or _has_hooks(module)

    def call_function(self, original: Callable[..., Any], function: type, args: Any, kwargs: Any) -> Any:
        """Stand in for ``autograd.Function.apply``: one call with its own backward."""
        if self._muted:
            return original(*args, **kwargs)
        from torch.utils.checkpoint import CheckpointFunction

        if function is CheckpointFunction:
            return args[0](*args[2:])
        full = (function, *args)
        return self.perform(
            "function", apply_function, function.__name__, lambda: original(*args, **kwargs), full, kwargs
        )

    def recorded(self) -> dict[int, int]:
        """Map the ids of all tensors that calls returned to the calls' indices."""
        return self._refs

    def finish(self, output: Any, buffers: dict[str, torch.Tensor]) -> Recording:
        """Record buffers that were assigned, and return the recording."""
        for name, tensor in buffers.items():
            if self._attributes.get(id(tensor)) != name and id(tensor) in self._refs:
                path, _, own = name.rpartition(".")
                table = self.model.get_submodule(path)._buffers
                args = (self.constant(table), own, self.reference(tensor))
                call = Call("function", assign_buffer, args, {}, "", f"#0/assign_{name}", writes=[name])
                self.calls.append(call)
        flat, unflatten = flatten_output(output)
        encoded = [self.reference(v) if isinstance(v, torch.Tensor) else v for v in flat]
        return Recording(self.calls, self.constants, encoded, unflatten)


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _is_training(call: Call) -> bool:
    name, position = _STATISTICS[call.target]
    return bool(call.kwargs.get(name, call.args[position] if len(call.args) > position else False))


def _where(path: str) -> str:
    return f"module {path!r}" if path else "the model's own forward"


_STATISTICS = {nn.functional.batch_norm: ("training", 5), nn.functional.instance_norm: ("use_input_stats", 5)}
_PLAIN = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, range)
