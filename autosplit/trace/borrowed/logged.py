"""Numbers that a forward reads of its values only to keep them: ``self.log.append(loss.item())``.

    recording    loss.item() ─► a LoggedNumber in the log; a copy of loss is one of the graph's last outputs
    call         the program runs ─► the number is read from that output and put into the log

Arithmetic with such a number is put off with it. Whatever else Python asks of it may decide something: the forward is
recorded again, and a read in that line of code is a value read (:mod:`autosplit.trace.reads.reads`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from autosplit.trace.recording.recording import Refusal

Real = Mapping[int, torch.Tensor]
_NUMBERS = (bool, int, float)


class Decides(Refusal):
    """The model does more than keep numbers that it reads in these lines of code."""

    def __init__(self, lines: Iterable[str], module: str) -> None:
        self.lines = frozenset(lines)
        super().__init__(f"forward uses a tensor's value that it reads ({', '.join(sorted(self.lines))})", module)


class LoggedNumber:
    """What ``item()`` gives while a forward is recorded: a number that is known when the program has run."""

    __slots__ = ("__weakref__", "compute", "decided", "kind", "lines", "operands", "tensors")

    def __init__(
        self,
        compute: Callable[[Real], Any],
        *,
        kind: type,
        lines: frozenset[str],
        decided: set[str],
        tensors: tuple[torch.Tensor, ...] = (),
        operands: tuple[LoggedNumber, ...] = (),
    ) -> None:
        self.compute, self.kind, self.lines, self.decided = compute, kind, lines, decided
        self.tensors, self.operands = tensors, operands

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # ``isinstance(number, float)`` is what it is in the plain model
        return self.kind

    def with_operands(self) -> Iterator[LoggedNumber]:
        """Yield the number and all that it is computed from."""
        yield self
        for operand in self.operands:
            yield from operand.with_operands()


def is_logged(value: Any) -> bool:
    """Tell whether a value is a number that is known later; ``isinstance`` does not tell."""
    return type(value) is LoggedNumber


def _used(number: LoggedNumber, *_: Any) -> Any:
    number.decided.update(number.lines)
    raise Decides(number.lines, "")


def _later(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(number: LoggedNumber, *others: Any) -> Any:
        parts = (*others, number) if swapped else (number, *others)
        logged = tuple(term for term in parts if is_logged(term))
        if any(type(term) not in _NUMBERS for term in parts if not is_logged(term)):
            return _used(number)
        return LoggedNumber(
            lambda real: function(*(term.compute(real) if is_logged(term) else term for term in parts)),
            kind=float,
            lines=frozenset().union(*(term.lines for term in logged)),
            decided=number.decided,
            operands=logged,
        )

    return method


for _name in "add sub mul truediv".split():
    setattr(LoggedNumber, f"__{_name}__", _later(getattr(operator, _name)))
    setattr(LoggedNumber, f"__r{_name}__", _later(getattr(operator, _name), swapped=True))
for _name in ("neg", "abs", "pow"):
    setattr(LoggedNumber, f"__{_name}__", _later(getattr(operator, _name)))
for _name in (
    "bool eq ne lt le gt ge hash float int index complex str repr format round floordiv rfloordiv mod rmod divmod rpow "
    "trunc floor ceil reduce_ex copy deepcopy array"
).split():
    setattr(LoggedNumber, f"__{_name}__", _used)
