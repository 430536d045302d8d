"""What the tensors of a forward are while it is recorded: inputs, results of calls, the model's own, constants.

Values are known by identity: every tensor that a call returned is kept alive until the recording ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from autosplit.trace.inputs.objects import is_object, storage_key, tensors_in
from autosplit.trace.recording.recording import (
    NESTED,
    Attribute,
    Call,
    Ref,
    Refusal,
    assign_buffer,
    source_line,
    where,
)
from autosplit.trace.scope import STATEFUL_LEAVES, Scope, takes_statistics

_OTHER = (torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (int, float, bool, str, complex, range, type(None), type(Ellipsis), *_OTHER)


class KnownValues:
    """The calls of a forward so far, what their tensors are, and which of the model's own they read and change."""

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        super().__init__()
        self.model = model
        self.scope = scope
        self.calls: list[Call] = []
        self.constants: dict[str, Any] = {}
        self.refs: dict[int, int] = {}  # the index of the call that returned a tensor, by its id
        self.attributes: dict[int, str] = {}
        self.inputs: list[tuple[torch.Tensor, bool]] = []  # and whether each requires a gradient: the first calls
        self.owners: dict[int, str] = {}
        self.parameters = frozenset(name for name, _ in model.named_parameters())
        self._keep: list[Any] = []
        self._stack: list[tuple[str, int]] = [("", 0)]
        self._storages: defaultdict[int, int] = defaultdict(count().__next__)
        self.modules = dict(model.named_modules())
        self._paths = {id(module): path for path, module in self.modules.items()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.attributes.setdefault(id(tensor), name)
            self._keep.append(tensor)
            self._storages.setdefault(storage_key(tensor), -1)
            self.owners.setdefault(storage_key(tensor), name)

    @property
    def path(self) -> str:
        """Qualified name of the module whose forward is running."""
        return self._stack[-1][0]

    def refusal(self, what: str, *, whole: str = "") -> Refusal:
        """Return a refusal of what the module whose forward is running does; ``whole``: see `Refusal`."""
        source = source_line()
        return Refusal(f"{where(self.path)} {what}" + (f" ({source})" if source else ""), self.path, whole=whole)

    # -- tensors -----------------------------------------------------------------------------------------------
    def add_input(self, name: str, tensor: torch.Tensor) -> None:
        """Bind an input tensor."""
        call = Call("input", name, (), {}, "", f"input/{name}")
        self.calls.append(call)
        self.note(call, tensor)
        self.refs[id(tensor)] = len(self.calls) - 1
        self.inputs.append((tensor, tensor.requires_grad))

    def note(self, call: Call, tensor: torch.Tensor) -> None:
        """Write a tensor that a call gives into the call."""
        if tensor.is_nested:
            raise Refusal(f"{where(self.path)} {NESTED}", "")
        call.note(tensor, self._storages[storage_key(tensor)])
        self._keep.append(tensor)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a recorded value, a parameter or a buffer, and no constant."""
        return id(tensor) in self.refs or self.attributes.get(id(tensor), "_") not in (*self.constants, "_")

    def reference(self, tensor: torch.Tensor) -> Ref | Attribute:
        """Return the recorded call or the attribute that a tensor is."""
        if id(tensor) in self.refs:
            return Ref(self.refs[id(tensor)])
        if id(tensor) in self.attributes:
            return Attribute(self.attributes[id(tensor)])
        if tensor.requires_grad and not tensor.is_leaf:
            raise self.refusal(
                f"uses a tensor with gradient history from outside the recorded calls "
                f"({type(tensor.grad_fn).__name__}); pass it as an input of the model"
            )
        if tensor.is_nested:
            raise Refusal(f"{where(self.path)} {NESTED}", "")
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            raise self.refusal(
                "makes a tensor in a way that cannot be recorded; use a torch function such as "
                "torch.tensor, torch.zeros or torch.arange"
            )
        return self.constant(tensor)

    def constant(self, value: Any) -> Attribute:
        """Bind any object that the graph must carry as a constant."""
        if id(value) not in self.attributes:
            prefix = "_constant" if isinstance(value, torch.Tensor) else "_object"
            self.attributes[id(value)] = f"{prefix}{len(self.constants)}"
            self.constants[self.attributes[id(value)]] = value
            self._keep.append(value)
        return Attribute(self.attributes[id(value)])

    def encode(self, value: Any) -> Any:
        """Replace tensors in nested arguments by what they are in the recording."""
        return map_aggregate(value, self._encoded)

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.reference(value)
        if isinstance(value, nn.Module) and id(value) in self._paths:
            return Attribute(self._paths[id(value)])
        if isinstance(value, np.generic):  # an operand of generated code must be a number that Python can print
            return value.item()
        if isinstance(value, _PLAIN):
            return value
        if is_object(value) and tensors_in(value):
            raise self.refusal(f"hands a {type(value).__name__} that holds tensors to a layer; hand over the tensors")
        return self.constant(value)

    # -- the model's own state ---------------------------------------------------------------------------------
    def track_state(self, call: Call, inputs: Sequence[torch.Tensor]) -> None:
        """Write into a call which parameters and buffers it reads, and which a norm in training changes."""
        names = self.attributes
        call.reads += [n for t in inputs if (n := names.get(id(t))) and n not in self.constants]
        module = None if call.leaf is None else self.modules[call.leaf]
        if module is not None:
            own_state = [names.get(id(t)) for t in (*module.parameters(), *module.buffers())]
            if None in own_state:
                raise Refusal(
                    f"forward replaces a parameter or buffer of module {call.leaf!r}, which a graph does not: do so "
                    "before the model is called",
                    "",
                )
            call.reads += filter(None, own_state)
        if isinstance(module, STATEFUL_LEAVES) and module.training and module.track_running_stats:
            statistics = {names[id(b)] for b in module.buffers()}
            call.writes += sorted(statistics - set(call.writes))
        elif takes_statistics(call):
            held = {self.owners.get(storage_key(tensor)) for tensor in inputs}
            statistics = {name for name, _ in self.model.named_buffers() if name in held}
            call.writes += sorted(statistics - set(call.writes))

    def track_mutation(self, call: Call, touched: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        """Write into a call which tensors it has changed in place, by their versions before it.

        Raises Refusal for a constant and for a parameter.
        """
        for tensor, version in zip(touched, versions, strict=True):
            changed, name = tensor._version != version, self.attributes.get(id(tensor))
            owner, storage = self.owners.get(storage_key(tensor)), self._storage_of(tensor)
            if changed and name in self.constants:
                raise self.refusal(
                    "changes a tensor in place that is a plain attribute; a graph would hold its own: register it as "
                    "a buffer"
                )
            if changed and owner is not None and owner in self.parameters:
                raise Refusal(in_place(owner), "")
            if owner is not None and name is None:
                call.views.append(owner)
            if owner is not None and changed and owner not in call.writes:
                call.writes.append(owner)
            if storage >= 0:
                call.reads_storages.append(storage)
                if changed:
                    call.mutates.append(storage)

    def _storage_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage, -1 for the model's own."""
        return self._storages.get(storage_key(tensor), -1)

    def assign_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Record that buffers are others now which were computed."""
        for name, tensor in buffers.items():
            if self.attributes.get(id(tensor)) != name and id(tensor) in self.refs:
                path, _, attribute = name.rpartition(".")
                table = self.modules[path]._buffers
                args = (self.constant(table), attribute, self.reference(tensor))
                self.calls.append(Call("function", assign_buffer, args, {}, "", f"#0/assign_{name}", writes=[name]))

    def give_back(self) -> None:
        """Let inputs, parameters and buffers that no call changed stand for themselves in what the model returns.

        Until now the last operation that returned its operand stood for it, as a dropout does in evaluation. What an
        opaque module gave back stays its result: with other values it may be a new tensor.
        """
        changed = {storage for call in self.calls for storage in call.mutates}
        changed |= {storage for call in self.calls if call.leaf in self.scope.opaque for storage in call.storages}
        for index, (tensor, requires_grad) in enumerate(self.inputs):
            if self._storage_of(tensor) not in changed and tensor.requires_grad == requires_grad:
                self.refs[id(tensor)] = index
        written = {name for call in self.calls for name in call.writes}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            unchanged = id(tensor) in self.attributes and self._storage_of(tensor) not in changed
            if unchanged and self.owners.get(storage_key(tensor)) not in written:
                self.refs.pop(id(tensor), None)


def in_place(parameter: str) -> str:
    """Return why a forward that changes a parameter is not recorded."""
    return (
        f"forward changes the parameter {parameter!r} in place, which a graph that runs by microbatch does not; "
        "register it as a buffer, or change it outside of forward"
    )
