"""What a node calls and of what, as keys: nodes with equal keys do equal work."""

from __future__ import annotations

import types
from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn


def called(node: fx.Node, root: nn.Module, places: Mapping[fx.Node, Hashable]) -> Hashable:
    """Return a key of what a node calls and of its arguments, in which ``places`` replace nodes."""
    target = attrgetter(str(node.target))(root) if node.op in ("call_module", "get_attr") else node.target
    return node.op, _described(target, {}), _described(node.args, places), _described(node.kwargs, places)


def value_kind(value: Any) -> Hashable:
    """Return what determines the work that is done with a value, as a key: equal work, equal keys."""
    return _described(value, {})


def _described(value: Any, places: Mapping[fx.Node, Hashable]) -> Hashable:
    """Return an argument of a node as a key: nodes by their places, tensors without their values, others by text."""
    if isinstance(value, fx.Node):
        return places.get(value, ("outside", value.name))
    if isinstance(value, torch.Tensor):
        is_parameter = isinstance(value, nn.Parameter)
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad, is_parameter
    if isinstance(value, nn.Module):
        return _module_kind(value)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_described(item, places) for item in value))
    if isinstance(value, dict):
        return tuple((key, _described(item, places)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(_described(item, places) for item in (value.start, value.stop, value.step)))
    return (type(value).__name__, repr(value))


def _module_kind(module: nn.Module) -> Hashable:
    """Return class, settings and state of one of torch's layers; any other, or one with hooks, is only like itself."""
    settings: list[Hashable] = []
    for child in module.modules():
        hooks = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks
        if hooks or not type(child).__module__.startswith("torch.nn"):
            return id(module)
        items = ((key, repr(item)) for key, item in child.__dict__.items() if isinstance(item, _SETTINGS))
        settings.append((type(child), *items))
    state = ((name, _described(t, {})) for name, t in (*module.named_parameters(), *module.named_buffers()))
    return (*settings, *state)


_SETTINGS = (bool, int, float, str, tuple, types.NoneType, types.FunctionType, types.BuiltinFunctionType)
"""The types of attributes that configure torch's layers: numbers, and functions such as activations."""
