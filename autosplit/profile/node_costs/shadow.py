"""A twin of a module tree: the same modules and attributes around other tensors; the original is only read."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

_CONTAINERS = (list, tuple, dict, set, OrderedDict)


@dataclass(frozen=True)
class Shadow:
    """The twin of a module tree, and all tensors that it holds."""

    module: nn.Module
    tensors: tuple[torch.Tensor, ...]


def shadow(
    root: nn.Module, *, replace: Callable[[torch.Tensor], torch.Tensor], nodes: Iterable[fx.Node] | None = None
) -> Shadow:
    """Return a twin of ``root`` in which every tensor is what ``replace`` made of it (once per tensor object).

    Modules that none of the ``nodes`` uses are left empty (None: all are filled): nobody is going to run them.

    Whatever runs on the twin - counters that move, buffers that are assigned, weights that a hook computes - stays on
    the twin, also when it raises. Attributes that are no tensor, module or container are shared.
    """
    builder = _ShadowBuilder(replace)
    if nodes is not None:
        unused = {id(module) for module in root.modules()} - _used(root, nodes)
        builder.modules |= {module: nn.Module() for module in unused}
    return Shadow(builder.module(root), tuple(builder.tensors.values()))


def _used(root: nn.Module, nodes: Iterable[fx.Node]) -> set[int]:
    """Return the ids of the modules that nodes use, of those inside of them and of those around them."""
    used = {id(root)}
    for path in {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}:
        value: Any = root
        for name in path.split("."):
            value = getattr(value, name)
            used.add(id(value))
        if isinstance(value, nn.Module):
            used.update(map(id, value.modules()))
    return used


class _ShadowBuilder:
    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.replace = replace
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                twin = self.tensors[id(value)] = self.replace(value)
                if type(twin) is nn.Parameter:  # quantised weights have a class and attributes of their own
                    twin.__class__ = type(value)  # type: ignore[assignment]
                    twin.__dict__.update((key, self.value(item)) for key, item in value.__dict__.items())
            return self.tensors[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self.module(value.__self__))
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.value(item)) for key, item in value.items())
        if type(value) in _CONTAINERS:
            return type(value)(self.value(item) for item in value)
        return value

    def module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in self.modules:
            twin: nn.Module = object.__new__(type(module))
            self.modules[id(module)] = twin
            for key, item in module.__dict__.items():
                twin.__dict__[key] = self.value(item)
        return self.modules[id(module)]
