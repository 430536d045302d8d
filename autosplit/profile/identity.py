"""What measured times depend on, as text that is the same in every process: a recording, its state, device and modes.

Values of tensors are left out: times that depend on them (experts that tokens are routed to) count as equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import platform
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace.calls import Ambient
from autosplit.trace.graph import TracedGraph
from autosplit.trace.python_state import signature

_LIBRARIES = frozenset("torch builtins operator _operator math".split())
_TABLES = frozenset("_parameters _buffers _modules".split())
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEPTH = 6
_ENTRIES = 4096
"""Of a container that is longer or deeper the size counts only."""


def recording_hash(traced: TracedGraph, *, rows: int) -> str:
    """Return a hash of a recording: its nodes with their targets, arguments, sizes and modules, and the state.

    Of the model's own Python (modules that stay whole, functions) it covers the code of the methods, not of what they
    call outside their classes.
    """
    digest = hashlib.sha256()
    for line in (*_nodes(traced, rows), *_state(traced.root)):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def tensor_text(tensor: torch.Tensor) -> str:
    """Return a tensor's kind: ``float32[8, 16]``, and what is unusual about it."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        text += f" {tensor.layout}"
    elif not tensor.is_contiguous():
        text += f" strides {list(tensor.stride())}"
    return text + (" gradient" if tensor.requires_grad else "")


def modes() -> dict[str, str]:
    """Return the modes of this thread and of torch's backends that change which kernels run."""
    backends: Any = torch.backends
    autocast = [f"{s.device_type} {s.dtype}" for s in Ambient.current().autocast if s.enabled]
    return {
        "autocast": ", ".join(autocast).replace("torch.", "") or "off",
        "matmul": f"{backends.cuda.matmul.fp32_precision}, {backends.mkldnn.matmul.fp32_precision}",
        "cudnn": f"{backends.cudnn.conv.fp32_precision}, benchmark {backends.cudnn.benchmark}",
        "deterministic": f"{torch.are_deterministic_algorithms_enabled()}, cudnn {backends.cudnn.deterministic}",
        "mkldnn": f"{backends.mkldnn.enabled}",
        "attention": f"flash {backends.cuda.flash_sdp_enabled()}, efficient {backends.cuda.mem_efficient_sdp_enabled()}"
        f", math {backends.cuda.math_sdp_enabled()}, cudnn {backends.cuda.cudnn_sdp_enabled()}",
    }


def device_text(device: torch.device) -> str:
    """Return which piece of hardware a device is, so that another machine's times are not taken for its own."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


@cache
def _processor() -> str:
    """Return the CPU's name: Linux alone has it in a file, elsewhere Python's standard library knows."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _nodes(traced: TracedGraph, rows: int) -> Iterator[str]:
    for node in traced.graph.nodes:
        target = _module(traced.root.get_submodule(str(node.target))) if node.op == "call_module" else ""
        line = f"{node.name} = {node.op} {_text(node.target)} {target} {_text(node.args)} {_text(node.kwargs)}"
        info = traced.info(node)
        if info is not None:
            sizes = [f"{tensor.dtype}{list(tensor.shape_at(rows))}" for tensor in info.tensors]
            line += f" -> {info.name} {info.node_class.value} {sizes} {info.mutated} {info.writes}"
        yield line


def _state(root: nn.Module) -> Iterator[str]:
    for name, tensor in (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)):
        yield f"{name}: {tensor_text(tensor)} {tensor.device.type}"
    for name, tensor in vars(root).items():
        if isinstance(tensor, torch.Tensor):
            yield f"{name}: {tensor_text(tensor)} {tensor.device.type}"


def _module(module: nn.Module) -> str:
    """Return class, mode, settings, hooks and, of an own class, the code of a module and its parts."""
    parts = []
    for path, part in module.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(part).items() if key not in _TABLES and not key.endswith("_hooks")}
        hooks = [len(value) for key, value in vars(part).items() if key.endswith("_hooks") and value]
        parts.append(f"{path}: {_text(type(part))} {_text(own)} {hooks}")
    return "; ".join(parts)


def _text(value: Any, depth: int = _DEPTH) -> str:
    """Return a value as text without addresses: equal in two processes when it means the same in both."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (*_PLAIN, *_TORCH)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, (list, tuple, dict)) and (depth == 0 or len(value) > _ENTRIES):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_text(item, depth - 1) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item, depth - 1)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if isinstance(value, nn.Module):
        return _text(type(value))
    if isinstance(value, type) or inspect.isroutine(value):
        return _function(value)
    if dataclasses.is_dataclass(value) and depth:
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return f"{_text(type(value))}{_text(fields, depth - 1)}"
    return f"{_text(type(value))} {signature(value, set())!r}"


def _function(value: Any) -> str:
    """Return the name of a function or class, and a hash of the code of one that belongs to no library."""
    module = str(getattr(value, "__module__", "") or "")
    name = f"{module}.{getattr(value, '__qualname__', type(value).__name__)}"
    return name if module.partition(".")[0] in _LIBRARIES else f"{name}@{_code_hash(value)}"


def _code_hash(value: Any) -> str:
    digest = hashlib.sha256()
    for function in _functions(value):
        for part in _codes(function.__code__):
            constants = [c for c in part.co_consts if not isinstance(c, (types.CodeType, frozenset))]
            digest.update(f"{part.co_name} {part.co_names} {constants}".encode())
            digest.update(part.co_code)
    return digest.hexdigest()[:16]


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions of a function, a method or a class with its own bases."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, type):
        own = [base for base in value.__mro__ if base.__module__.partition(".")[0] not in _LIBRARIES]
        members: Sequence[Any] = [member for base in own for member in vars(base).values()]
        plain: list[Callable[..., Any] | None] = [
            getattr(member, "__func__", None) or getattr(member, "fget", None) or member for member in members
        ]
        yield from (function for function in plain if isinstance(function, types.FunctionType))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
