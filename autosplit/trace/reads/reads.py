"""Value reads in a model's own Python: ``if mask.any()``, ``lengths.max().item()``.

A read whose value follows from the inputs and the buffers by a few cheap operations is a *guard*: it is answered from
the sample's own values while the model is recorded, and computed again from every later batch before the recording is
used for it. Any other read is refused: the module in whose forward it stands becomes an opaque module.

    recording at the sample's own rows   ValueReader       computes the answers from real values
    the same on the meta device          MetaValueReader   computes what sizes decide, and takes values to be ordinary
    recordings at few rows               Recall            gives the same answers in the same order
    a call of the pipe                   Guard             computes them again, on the whole batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from autosplit.errors import ForeignSuppressed
from autosplit.trace.graph import Length, lengths_in
from autosplit.trace.on_cpu import OnCpu, to_cpu
from autosplit.trace.recording.build import build
from autosplit.trace.recording.merge import MergedRecording
from autosplit.trace.recording.recording import Attribute, Call, Ref, Refusal, leaves_in, refs_in, where
from autosplit.trace.recording.values import KnownValues
from autosplit.trace.scope import Answer, Scope

_ELEMENTS = 1 << 24  # a mask of 64 rows of 4096 tokens takes a few million
_PARAMETER_ELEMENTS = 1 << 12
_OF_FINITE = {
    (*test, read): test == ("isfinite", "all")
    for test in (("isfinite", "all"), ("isnan", "any"), ("isinf", "any"))
    for read in ("__bool__", "item", "is_nonzero")
}
_YES_OR_NO = frozenset("__bool__ is_nonzero __contains__ equal allclose".split())
_WAY_OUT = "compute the choice with torch.where, or move it out of forward"


class Recall:
    """Answers value reads as they were answered before."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self.position = 0

    def read(self, call: Call, known: KnownValues) -> Any:
        """Return the next answer; raise Refusal when it is that of another read."""
        if self.position >= len(self.answers) or self.answers[self.position].name != call.name:
            raise Refusal(f"{call.name} reads a tensor's value at some batch sizes only; {_WAY_OUT}", call.module)
        self.position += 1
        return self.answers[self.position - 1].value


def _asked(call: Call, calls: Sequence[Call]) -> tuple[str, str, str]:
    """Return the names of the operations behind a read of one value: those of ``bool(isnan(x).any())``."""
    names = [call.target.__name__]
    while len(names) < 3 and len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], Ref):
        call = calls[call.args[0].index]
        names.append(str(getattr(call.target, "__name__", "")))
    first, second, third = (*reversed(names), "", "")[:3]
    return first, second, third


class ValueReader:
    """Answers value reads from the real values of a sample."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], *, on_cpu: bool = False) -> None:
        """``on_cpu``: the model is recorded on the CPU, wherever it and the inputs lie."""
        self.inputs, self.on_cpu = inputs, on_cpu
        self.input_elements = sum(tensor.numel() for tensor in inputs.values())
        self.parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.state: dict[str, torch.Tensor] = {**self.parameters, **dict(model.named_buffers())}
        self.answers: list[Answer] = []
        self._values: dict[int, Any] = {}

    def read(self, call: Call, known: KnownValues) -> Any:
        """Compute what the read gives, from as few of the recorded calls as it needs."""
        needed = _behind(known.calls, [call])
        self._check(call, known, needed)
        with torch.no_grad(), _disable_current_modes():
            for index in needed:
                if index not in self._values:
                    self._values[index] = self._run(known.calls[index], known)
            value = self._run(call, known)
        if not isinstance(value, (bool, int, float, str, list, torch.Size)):
            text = "takes a tensor's values out of torch; a graph cannot follow that"
            raise Refusal(f"{_place(call)} {text}", call.module)
        self.answers.append(Answer(call.name, value, call.source))
        return value

    def _check(self, call: Call, known: KnownValues, needed: Sequence[int]) -> None:
        calls = [known.calls[index] for index in needed]
        storages = {s for c in calls for s in (*c.storages, *c.reads_storages)}
        changed = {s for c in known.calls for s in c.mutates}
        reads = {name for c in (*calls, call) for name in _attributes((c.args, c.kwargs))}
        written = {name for c in known.calls for name in c.writes}
        elements = sum(math.prod(shape) for c in calls for shape in c.shapes if c.kind != "input")
        large = [n for n in reads if n in self.parameters and self.parameters[n].numel() > _PARAMETER_ELEMENTS]
        problem = next(
            (
                text
                for text, holds in (
                    ("depends on a layer", any(c.leaf is not None for c in calls)),
                    ("depends on large parameters", bool(large)),
                    ("depends on random numbers", any(c.random for c in calls)),
                    ("depends on values that are changed in place", bool(storages & changed or reads & written)),
                    ("depends on much computation", elements > _ELEMENTS + 64 * self.input_elements),
                )
                if holds
            ),
            None,
        )
        if problem is not None:
            raise Refusal(f"{_place(call)} reads a tensor's value in Python, and it {problem}; {_WAY_OUT}", call.module)

    def _run(self, call: Call, known: KnownValues) -> Any:
        if call.kind == "input":
            return self._placed(self.inputs[call.target])
        return call.target(*self._real(call.args, known), **self._real(call.kwargs, known))

    def _real(self, value: Any, known: KnownValues) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return self._values[leaf.index]
            if isinstance(leaf, Attribute):
                return self._placed(self.state[leaf.name] if leaf.name in self.state else known.constants[leaf.name])
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return map_aggregate(value, real)

    def _placed(self, value: Any) -> Any:
        return to_cpu(value) if self.on_cpu else value


class MetaValueReader(ValueReader):
    """Answers value reads of a model on the meta device.

    What sizes decide is computed, and so is what inputs decide that have values. Values are taken to be finite, and any
    other yes or no about the inputs is a no: a mask that is asked whether it lets everything pass is planned as one
    that does not.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], *, on_cpu: bool = False) -> None:
        super().__init__(model, inputs, on_cpu=on_cpu)
        self.inputs = {name: tensor for name, tensor in inputs.items() if not tensor.is_meta}

    def read(self, call: Call, known: KnownValues) -> Any:
        """Return the answer; raise Refusal for a number, or what layers computed."""
        asked = _asked(call, known.calls)
        needed = _behind(known.calls, [call])
        calls = [known.calls[index] for index in needed]
        held = [name for c in (*calls, call) for name in _attributes((c.args, c.kwargs))]
        if asked in _OF_FINITE:
            value = _OF_FINITE[asked]
        elif not held and all(map(self._is_computed, calls)):
            return super().read(call, known)
        elif call.target.__name__ in _YES_OR_NO and not held and not any(c.leaf or c.random for c in calls):
            value = False
        else:
            raise Refusal(f"{_place(call)} reads a tensor's value, and a model on the meta device has none", "")
        self.answers.append(Answer(call.name, value, call.source))
        return value

    def _is_computed(self, call: Call) -> bool:
        known = call.kind in ("function", "project") or (call.kind == "input" and call.target in self.inputs)
        return known and not (call.random or call.mutates)


Reader = Recall | ValueReader
"""Tells a recorder what a value read gives; its ``read`` raises Refusal when no graph can follow the read."""


@dataclass(frozen=True)
class Guard:
    """Tells whether a recording holds for a batch: its value reads give there what they gave when it was made."""

    graph: fx.Graph
    root: nn.Module
    answers: tuple[Answer, ...]
    lengths: tuple[Length, ...] = ()
    home: torch.device | None = None
    """Where the recording was made; None: on the CPU, wherever its tensors lay."""
    known: set[tuple[int, ...]] = field(default_factory=set, compare=False)
    """Rows and lengths for which it holds, where it reads nothing else."""

    @cached_property
    def reads_sizes(self) -> bool:
        """Whether the reads depend on nothing but the sizes of a batch."""
        inputs = [*self.graph.find_nodes(op="placeholder")][1 + len(self.lengths) :]
        return not any(node.users for node in inputs) and not self.graph.find_nodes(op="get_attr")

    def holds(self, inputs: Sequence[torch.Tensor], rows: int) -> bool:
        """Compute the reads from the input tensors of a whole batch of ``rows`` rows."""
        lengths = lengths_in(self.lengths, [tensor.shape for tensor in inputs]).values()
        if (rows, *lengths) in self.known:
            return True
        with ForeignSuppressed(), torch.no_grad():
            values = self._run(inputs)(rows, *lengths)
            held = all(value == answer.value for value, answer in zip(values, self.answers, strict=True))
            self.known.update([(rows, *lengths)] if held and self.reads_sizes else ())
            return held
        return False  # reads that fail on this batch do not give what they gave

    @cached_property
    def _function(self) -> Callable[..., Any]:
        """The reads as a Python function of the root and the graph's inputs."""
        program = fx.GraphModule(nn.Module(), fx.Graph())
        program.graph = self.graph
        return type(program).forward

    def _run(self, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Return what computes the reads: where all lies where it was recorded, or on the CPU."""
        held = [attrgetter(str(node.target))(self.root) for node in self.graph.find_nodes(op="get_attr")]
        if {value.device for value in (*inputs, *held) if isinstance(value, torch.Tensor)} <= {self.home}:
            return lambda *sizes: self._function(self.root, *sizes, *inputs)
        return lambda *sizes: _OnCpu(self.root, graph=self.graph).run(*sizes, *map(to_cpu, inputs))


class _OnCpu(OnCpu):
    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return to_cpu(super().get_attr(target, args, kwargs))


def guard_of(model: nn.Module, merged: MergedRecording, scope: Scope) -> Guard | None:
    """Return the guard of a recording with value reads, None for one without."""
    calls = [m.call for m in merged.calls]
    reads = [index for index, call in enumerate(calls) if call.kind == "read"]
    if not reads:
        return None
    needed = {*_behind(calls, [calls[i] for i in reads]), *reads}
    kept = needed | {i for i, call in enumerate(calls) if call.kind == "input"}
    only = MergedRecording(merged.calls, [Ref(i) for i in reads], merged.recording, merged.lengths)
    raw = build(model, only, keep=kept)
    return Guard(raw.graph, raw.root, scope.answers, raw.lengths, None if scope.on_cpu else scope.home)


def without_reads(merged: MergedRecording) -> frozenset[int]:
    """Return the indices of the calls that a graph needs: all but value reads and what only these use."""
    calls = [m.call for m in merged.calls]
    reads = [call for call in calls if call.kind == "read"]
    if not reads:
        return frozenset(range(len(calls)))
    behind = set(_behind(calls, reads))
    changes = [bool(call.random or call.mutates or call.writes or call.kind == "input") for call in calls]
    free = {i for i in behind if not changes[i]}
    others = [c for i, c in enumerate(calls) if c.kind != "read" and i not in free]
    live = {*_behind(calls, others), *(ref.index for ref in refs_in(merged.output))}
    live |= set(_behind(calls, [calls[i] for i in live]))
    return frozenset(i for i, c in enumerate(calls) if c.kind != "read" and (i in live or i not in free))


def _behind(calls: Sequence[Call], ends: Iterable[Call]) -> list[int]:
    """Return the indices of the calls that some calls depend on, in order."""
    indices: set[int] = set()
    todo = [ref.index for call in ends for ref in refs_in((call.args, call.kwargs))]
    while todo:
        index = todo.pop()
        if index not in indices:
            indices.add(index)
            todo += [ref.index for ref in refs_in((calls[index].args, calls[index].kwargs))]
    return sorted(indices)


def _attributes(value: Any) -> list[str]:
    return [leaf.name for leaf in leaves_in(value) if isinstance(leaf, Attribute)]


def _place(call: Call) -> str:
    return f"{where(call.module)} ({call.source})" if call.source else where(call.module)
