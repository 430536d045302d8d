"""What constructors do to tensors on the meta device that leaves no trace there, as their code tells.

Read are the names in the code of ``__init__`` and of the functions that it names, except for those of torch and for
initialisers, which can run again.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

_UNSET = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"}
"""Constructors of torch that give memory on the CPU whatever the default device."""


def calls(kind: type, method: str) -> bool:
    """Tell whether a class's constructor names a method of it."""
    return any(method in code.co_names for code in _codes(kind, [method]))


def writes_data(kind: type, initialisers: Collection[str]) -> bool:
    """Tell whether a class's constructor, without ``initialisers``, writes to tensors by ``.data``."""
    return any(map(_writes_data, _codes(kind, initialisers)))


def leaves_unset(kind: type) -> bool:
    """Tell whether a class's constructor makes tensors with memory that meta does not keep from being made."""
    return any(not _UNSET.isdisjoint(code.co_names) for code in _codes(kind))


def copies(kind: type) -> bool:
    """Tell whether a class's constructor makes copies, whose numbers of writes start anew."""
    return any("deepcopy" in code.co_names for code in _codes(kind, torch=True))


def _writes_data(code: CodeType) -> bool:
    if "data" not in code.co_names:
        return False
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    changes = any(name.endswith("_") and not name.endswith("__") for name in code.co_names)
    return changes or ("STORE_ATTR", "data") in steps or any(name == "STORE_SUBSCR" for name, _ in steps)


def _codes(kind: type, without: Collection[str] = (), *, torch: bool = False) -> Iterator[CodeType]:
    """Yield the code of a class's constructors and of the functions that they name; ``torch``: of layers too."""
    seen: set[CodeType] = set()
    todo: list[tuple[Any, Any]] = []

    def add(function: Any) -> None:
        function = inspect.unwrap(function) if callable(function) else function
        if inspect.isfunction(function) and (
            not function.__module__.startswith("torch.")
            or (torch and function.__module__.startswith("torch.nn.modules."))
        ):
            todo.append((function.__code__, function.__globals__))

    for each in kind.__mro__:
        add(vars(each).get("__init__"))
    while todo:
        code, names = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code
        todo += [(inner, names) for inner in code.co_consts if isinstance(inner, CodeType)]
        for name in set(code.co_names).difference(without):
            add(getattr(kind, name, None) if hasattr(kind, name) else names.get(name))
