"""Value reads that only decide whether the model raises: ``assert x.min() >= 0``, ``if isnan(x).any(): raise``.

The bytecode behind the read tells: one way of the branch runs straight into a ``raise``. Such a read is recorded as an
operation of its own, :func:`check_value`, and answered so that the model goes on. What a check of the whole batch says
is what checks of its rows say where it is an ``all`` or ``any`` of them; any other check sees the whole batch.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributions.constraints
import torch.overrides
from torch._subclasses.fake_tensor import FakeTensor

from autosplit.trace.inputs.objects import tensors_in
from autosplit.trace.recording.recording import Call, Ref

_READS = frozenset("__bool__ is_nonzero item equal allclose".split())
_SKIPPED = (
    str(Path(__file__).parents[1]),
    str(torch.overrides.__file__),
    str(Path(torch.__file__).parent / "_tensor.py"),
)
_CONSTRAINTS = str(torch.distributions.constraints.__file__)
_DOES_MORE = ("STORE_", "DELETE_", "RETURN_", "YIELD_", "RERAISE", "FOR_ITER", "SEND")
_PASSED = ("CALL", "PRECALL", "TO_BOOL", "NOP", "EXTENDED_ARG", "NOT_TAKEN")
"""What may stand between a read and the branch on it."""
_EVERY = frozenset("_is_all_true all".split())
_LEAST, _MOST = frozenset("min amin".split()), frozenset("max amax".split())
_ABOVE, _BELOW = frozenset("ge gt __ge__ __gt__".split()), frozenset("le lt __le__ __lt__".split())
_NOT = frozenset("logical_not __invert__ bitwise_not".split())


@dataclass(frozen=True)
class Assertion:
    """A read on which the model raises: the answer for which it does not, and the exception for any other.

    ``text`` is the exception's own message where that is a constant, else "".
    """

    expected: bool
    error: type[Exception]
    text: str = ""


def check_value(
    expected: bool, error: type[Exception], text: str, read: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    """Raise what the model raises where a value that it checks is not the expected one; fake tensors have no values."""
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors_in((args, kwargs))):
        return
    if bool(read(*args, **kwargs)) is not expected:
        raise error(text)


def assertion_here(label: str) -> Assertion | None:
    """Return what the code that reads a value right now asserts of it; None where it does more than raise."""
    if label not in _READS:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return None
    if frame.f_code.co_filename == _CONSTRAINTS:  # what is answered there decides a check of a distribution's arguments
        return Assertion(True, ValueError)
    branch = _branch(frame.f_code, frame.f_lasti)
    if branch is None:
        return None
    expected, name, text = branch
    named = frame.f_globals.get(name, getattr(builtins, name, None))
    takes_text = isinstance(named, type) and issubclass(named, Exception) and named.__module__ == "builtins"
    error: type[Exception] = named if takes_text else ValueError  # type: ignore[assignment]
    return Assertion(expected, error, text)


@lru_cache(maxsize=1024)
def _branch(code: CodeType, position: int) -> tuple[bool, str, str] | None:
    """Return the answer with which code goes on after a read, and the exception's name and text otherwise."""
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: number for number, instruction in enumerate(instructions)}
    number, inverted = max(n for offset, n in places.items() if offset <= position), False
    while (name := instructions[number].opname).startswith(_PASSED) or name == "UNARY_NOT":
        inverted ^= name == "UNARY_NOT"
        number += 1
    if "JUMP" not in name or not name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_on = name.endswith("IF_TRUE") ^ inverted
    target = places[instructions[number].argval]
    jumped, passed = _raised(instructions[target:]), _raised(instructions[number + 1 :])
    if jumped and not passed:
        return not jumps_on, *jumped
    return (jumps_on, *passed) if passed and not jumped else None


def _raised(instructions: Iterable[dis.Instruction]) -> tuple[str, str] | None:
    """Return the name and the constant text of what straight-line code raises; None where it does anything before."""
    loads: list[dis.Instruction] = []
    for instruction in instructions:
        name = instruction.opname
        if name == "RAISE_VARARGS":
            first, *rest = loads
            error = "AssertionError" if first.opname == "LOAD_ASSERTION_ERROR" else str(first.argval)
            told = len(rest) == 1 and isinstance(rest[0].argval, str) and rest[0].opname == "LOAD_CONST"
            return error, rest[0].argval if told else ""
        if name.startswith(_DOES_MORE) or "JUMP" in name:
            return None
        if name.startswith(("LOAD_", "BUILD_")):
            loads.append(instruction)
    return None


def holds_by_rows(value: Any, expected: bool, calls: Sequence[Call]) -> bool:
    """Tell whether a checked value holds for a batch exactly when it holds for all parts of the batch."""
    while isinstance(value, Ref) and _name(calls[value.index]) in _NOT:
        value, expected = calls[value.index].args[0], not expected
    if not isinstance(value, Ref):
        return False
    call = calls[value.index]
    if _name(call) in _EVERY or _name(call) == "any":
        return expected is (_name(call) != "any")
    compared = call.args[0] if call.args else None
    if not isinstance(compared, Ref) or isinstance(call.args[-1], Ref) or len(calls[compared.index].args) != 1:
        return False
    reduced, compares = _name(calls[compared.index]), _name(call)
    if expected:
        return (reduced in _LEAST and compares in _ABOVE) or (reduced in _MOST and compares in _BELOW)
    return (reduced in _MOST and compares in _ABOVE) or (reduced in _LEAST and compares in _BELOW)


def _name(call: Call) -> str:
    return str(getattr(call.target, "__name__", ""))
