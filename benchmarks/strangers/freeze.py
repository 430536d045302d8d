"""Values written down so that two runs can be compared: containers, tensors, modules' own state, random generators."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

DEPTH = 6
PLAIN = (int, float, complex, str, bytes, bool, type(None))


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first floating tensor of a nested output."""
    if isinstance(output, torch.Tensor):
        return output
    values = (
        output.values()
        if isinstance(output, Mapping)
        else output
        if isinstance(output, list | tuple)
        else vars(output).values()
    )
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
        if isinstance(value, Mapping | list | tuple):
            return first_tensor(value)
    raise TypeError(f"no tensor in {type(output).__name__}")


def freeze(value: Any, depth: int = DEPTH) -> Any:
    """Return a copy of a value in tensors, plain values, tuples and dicts, which later changes do not reach."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, list | tuple | collections.deque):
        return (type(value).__name__, *(freeze(entry, depth - 1) for entry in value))
    if isinstance(value, Mapping):
        return {str(key): freeze(entry, depth - 1) for key, entry in value.items()} | {"": type(value).__name__}
    if isinstance(value, set | frozenset):
        return (type(value).__name__, *sorted(repr(entry) for entry in value))
    return _other(value, depth)


def _other(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Generator):
        return ("Generator", value.get_state())
    if isinstance(value, random.Random):
        return ("Random", value.getstate())
    if isinstance(value, numpy.random.RandomState):
        return ("RandomState", str(value.get_state()))
    if isinstance(value, numpy.random.Generator):
        return ("numpy.Generator", str(value.bit_generator.state))
    if isinstance(value, numpy.ndarray | numpy.generic):
        return ("ndarray", torch.as_tensor(numpy.array(value)))
    if isinstance(value, nn.Module):
        return ("module", type(value).__name__)
    if isinstance(value, types.FunctionType | types.MethodType | type | types.BuiltinFunctionType):
        return getattr(value, "__qualname__", str(value))
    entries = getattr(value, "__dict__", None)
    if isinstance(value, RemovableHandle):  # its number counts up over the whole process
        entries = {"removed": value.id not in (value.hooks_dict_ref() or ())}
    if entries:
        return (type(value).__name__, freeze(dict(entries), depth - 1))
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _tensor(value: torch.Tensor) -> Any:
    if type(value).__name__ in ("FakeTensor", "BatchedTensor"):
        return f"a {type(value).__name__}"
    if isinstance(value, nn.parameter.UninitializedTensorMixin):
        return "uninitialized"
    kind = "Parameter" if isinstance(value, nn.Parameter) else type(value).__name__
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    return {"": kind, "dtype": str(value.dtype), "requires_grad": value.requires_grad, "value": dense.clone()}


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return every module's class, attributes, parameters with gradients, buffers and hooks, by name."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        entries = {key: freeze(value) for key, value in vars(module).items() if not _is_apart(key)}
        for key, hooks in vars(module).items():
            if "_hooks" in key and isinstance(hooks, dict):  # their keys count up over the whole process
                entries[key] = freeze(list(hooks.values()))
        entries["class"] = type(module).__qualname__
        entries["children"] = tuple(module._modules)
        entries["parameters"] = {key: freeze(value) for key, value in module._parameters.items()}
        entries["grads"] = {
            key: freeze(None if value is None or isinstance(value, nn.parameter.UninitializedParameter) else value.grad)
            for key, value in module._parameters.items()
        }
        entries["buffers"] = {key: freeze(value) for key, value in module._buffers.items()}
        state[name or "the model"] = entries
    return state


def _is_apart(key: str) -> bool:
    return key in ("_parameters", "_modules", "_buffers") or "_hooks" in key


def differences(left: Any, right: Any, tolerance: float, place: str = "") -> Iterator[str]:
    """Yield where two frozen values differ, with both sides; ``left`` is the plain model's."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        yield from _tensor_differences(left, right, tolerance, place)
    elif type(left) is not type(right):
        yield f"{place}: {_short(left)} in the plain model, {_short(right)} in the pipe"
    elif isinstance(left, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            inner = f"{place}.{key}" if key else place
            if key not in left or key not in right:
                yield f"{inner}: only in the {'plain model' if key in left else 'pipe'}"
            else:
                yield from differences(left[key], right[key], tolerance, inner)
    elif isinstance(left, list | tuple):
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            if isinstance(one, tuple) and len(one) == 2 and one[0] == other[0] and ": " in str(one[0]):
                yield from differences(one[1], other[1], tolerance, one[0])
            else:
                yield from differences(one, other, tolerance, f"{place}[{index}]")
        if len(left) != len(right):
            yield f"{place}: {len(left)} entries in the plain model, {len(right)} in the pipe"
    elif isinstance(left, float):
        if not abs(left - right) <= tolerance * max(1.0, abs(left)) and not (left != left and right != right):
            yield f"{place}: {left} in the plain model, {right} in the pipe"
    elif left != right:
        yield f"{place}: {_short(left)} in the plain model, {_short(right)} in the pipe"


def _tensor_differences(left: torch.Tensor, right: torch.Tensor, tolerance: float, place: str) -> Iterator[str]:
    if left.shape != right.shape or left.dtype != right.dtype:
        sides = (f"{list(side.shape)} {side.dtype}" for side in (left, right))
        yield "{}: {} in the plain model, {} in the pipe".format(place, *sides)
    elif left.numel():
        if left.dtype in (torch.float32, torch.float16, torch.bfloat16):
            tolerance = max(tolerance, 1e-4)
        if left.is_floating_point() or left.is_complex():
            bound = tolerance * max(1.0, float(left.abs().nan_to_num().max()))
            close = torch.isclose(left, right, rtol=0.0, atol=bound, equal_nan=True)
            if not bool(close.all()):
                yield f"{place}: off by {float((left - right).abs().nan_to_num(nan=float('inf')).max()):.2g}"
        elif not torch.equal(left, right):
            yield f"{place}: {int((left != right).sum())} of {left.numel()} entries differ"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else text[:77] + "..."
