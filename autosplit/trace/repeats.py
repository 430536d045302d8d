"""Repeated blocks: what one did at a batch size, its equals do too, and need not be run for.

    first recording    every module's Python runs; entered modules whose calls are equal but for names are *equals*
    later recordings   the first of some equals runs; where another is given the same kind of inputs, the first one's
                       calls are written down again under its own names

    blocks.0:  linear(x, blocks.0.w) ─► relu            blocks.1:  linear(y, blocks.1.w) ─► relu

So the Python of every block runs at one batch size, and again at every batch size that the caller uses, when the merged
recording is checked there; only the sizes that the recorder chooses itself are taken from its equal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.trace.calls import Ambient, assign_buffer
from autosplit.trace.recording import Attribute, Call, Ref
from autosplit.trace.structure import flatten_output

if TYPE_CHECKING:
    from autosplit.trace.record import Recorder

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_FEWEST_CALLS = 4


@dataclasses.dataclass(frozen=True)
class Segment:
    """The calls of one run of an entered module: what it was given, which calls it made, what it returned."""

    path: str
    given: list[Any]
    """Encoded leaves of the arguments."""
    kinds: Any
    """All that the calls may depend on: structure of the arguments, their shapes, plain values, ambient state."""
    storages: list[int]
    """Storage numbers of the arguments' tensors, -1 for what is none."""
    start: int
    end: int
    returned: list[Any]
    """Encoded leaves of what it returned, and the tensors among them."""
    tensors: list[torch.Tensor | None]
    after: list[Any]
    """The arguments' leaves encoded anew: an operation that returns its operand stands for it from then on."""
    rebuild: Callable[[list[Any]], Any]


def _describe(args: Any, kwargs: Any) -> tuple[list[Any], Any] | None:
    """Return the argument leaves and what a block's calls may depend on; None where that cannot be told."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    seen: dict[int, int] = {}
    kinds: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            first = seen.setdefault(id(leaf), position)
            strides = tuple(leaf.stride()) if leaf.layout is torch.strided else None
            kinds.append((first, tuple(leaf.shape), strides, leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN):
            kinds.append((type(leaf), leaf))
        else:
            return None
    return leaves, (spec, kinds, Ambient.current())


def equals(
    calls: Sequence[Call],
    segments: Mapping[str, Segment],
    kinds: Mapping[str, type],
) -> dict[str, str]:
    """Map modules to the first module whose calls were the same but for names; ``kinds`` are the modules' classes.

    What is inside of a module that has an equal is not looked at: it is asked for with the module around it.
    """
    if any(call.target is assign_buffer for call in calls):
        return {}
    firsts: dict[type, list[tuple[Segment, Any]]] = {}
    of_kind = Counter(kinds[path] for path in segments)
    found: dict[str, str] = {}
    known_to = 0  # the end of the last module that has an equal
    for path, segment in sorted(segments.items(), key=_outermost_first):
        if segment.end - segment.start < _FEWEST_CALLS or segment.end <= known_to or of_kind[kinds[path]] < 2:
            continue
        form = _form_of(calls, segment)
        if form is None:
            continue
        others = firsts.setdefault(kinds[path], [])
        like = next((s.path for s, other in others if s.kinds == segment.kinds and other == form), None)
        if like is None:
            others.append((segment, form))
        else:
            found[path] = like
            known_to = segment.end
    return found


def _outermost_first(item: tuple[str, Segment]) -> tuple[int, int, int]:
    path, segment = item
    return segment.start, -segment.end, len(path)


def _form_of(calls: Sequence[Call], segment: Segment) -> Any:
    """Return the calls of a segment without its own names; None when they reach outside."""
    own = calls[segment.start : segment.end]
    if any(c.kind == "read" or not _inside(c.module, segment.path) for c in own):
        return None
    namer = _Namer(segment.path, "")
    refs = _refs(segment, 0)
    storages = _storages(own, segment, iter(range(1 << 30, 1 << 31)))
    shown = [{**vars(namer.call(call, refs, storages)), "source": ""} for call in own]
    return shown, namer.value(segment.returned, refs), namer.value(segment.after, refs)


def _inside(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


class Repeats:
    """Runs entered modules for a recorder, or writes down again what their equals did.

    Attributes:
        alike: maps modules to their equals.
        segments: the runs of the entered modules that were called once.
    """

    def __init__(self, alike: Mapping[str, str]) -> None:
        self.alike = alike
        self.segments: dict[str, Segment] = {}

    def enter(
        self, recorder: Recorder, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any
    ) -> Any:
        """Return what an entered module returns, with its calls recorded."""
        with recorder.muted():
            first = recorder.calls_of(path) == 1 and not any(m._forward_hooks for m in module.modules())
            described = _describe(args, kwargs) if first else None
            if described is not None:
                leaves, kinds = described
                given = [recorder.encode(leaf) for leaf in leaves]
                storages = [recorder.storage_of(leaf) for leaf in leaves]
        if described is None:
            self.segments.pop(path, None)
            return original(module, *args, **kwargs)
        like = self._like(path, kinds)
        start = len(recorder.calls)
        if like is None:
            out = original(module, *args, **kwargs)
        else:
            out = _replay(recorder, like, path, leaves, given, storages)
        with recorder.muted():
            flat, rebuild = flatten_output(out)
            tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in flat]
            known = all(recorder.knows(tensor) for tensor in tensors if tensor is not None)
            if known and all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in flat):
                returned, after = [recorder.encode(leaf) for leaf in flat], [recorder.encode(leaf) for leaf in leaves]
                end = len(recorder.calls)
                self.segments[path] = Segment(
                    path, given, kinds, storages, start, end, returned, tensors, after, rebuild
                )
        return out

    def _like(self, path: str, kinds: Any) -> Segment | None:
        """Return the run of a module's equal that was given the same kind of inputs; None where there is none."""
        like = self.segments.get(self.alike.get(path, ""))
        return like if like is not None and like.kinds == kinds else None


def _replay(
    recorder: Recorder, like: Segment, path: str, leaves: list[Any], given: list[Any], storages: list[int]
) -> Any:
    """Write the calls of a module's equal down under the module's own names; return tensors like the equal's."""
    start = len(recorder.calls)
    own = recorder.calls[like.start : like.end]
    namer, refs = _Namer(like.path, path), _refs(like, start - like.start, given)
    numbers = _storages(own, like, iter(recorder.fresh_storage, None), storages)
    recorder.calls += [namer.call(call, refs, numbers) for call in own]
    outputs: list[Any] = []
    for value, tensor in zip(like.returned, like.tensors, strict=True):
        now = namer.value(value, refs)
        if tensor is None:
            outputs.append(value)
        elif isinstance(now, Ref) and now.index >= start:
            with recorder.muted():
                outputs.append(_similar(tensor))
            recorder.adopt(outputs[-1], now.index)
        else:
            outputs.append(next(leaf for leaf, other in zip(leaves, given, strict=True) if other == now))
    for leaf, ref in zip(leaves, like.after, strict=True):
        if isinstance(ref, Ref) and isinstance(now := refs(ref), Ref) and now.index >= start:
            recorder.stand_for(leaf, now.index)
    return like.rebuild(outputs)


def _similar(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_().clone() if tensor.requires_grad else made


def _refs(segment: Segment, shift: int, given: list[Any] | None = None) -> Callable[[Any], Any]:
    """Return how references change: into the segment by ``shift``, to its arguments into those that are ``given``."""
    arguments = {value.index: position for position, value in enumerate(segment.given) if isinstance(value, Ref)}

    def change(ref: Any) -> Any:
        if segment.start <= ref.index < segment.end:
            return Ref(ref.index + shift) if given is not None else ("own", ref.index - segment.start)
        position = arguments.get(ref.index)
        if position is None:
            return ref
        return given[position] if given is not None else ("argument", position)

    return change


def _storages(own: Sequence[Call], segment: Segment, fresh: Any, given: list[int] | None = None) -> dict[int, int]:
    """Map the storage numbers in calls: those of arguments to ``given`` (or to their place), new ones to fresh."""
    numbers: dict[int, int] = {-1: -1}
    for position, number in enumerate(segment.storages):
        if number >= 0:
            numbers.setdefault(number, given[position] if given is not None else -2 - position)
    made = {number for call in own for number in call.storages}
    for call in own:
        for number in (*call.storages, *call.reads_storages, *call.mutates):
            if number not in numbers:
                numbers[number] = next(fresh) if number in made else number
    return numbers


class _Namer:
    """Replaces one module's name by another's, in all that a call holds."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def name(self, name: str) -> str:
        if name == self.old or name.startswith((f"{self.old}.", f"{self.old}#")):
            return self.new + name[len(self.old) :]
        return name

    def value(self, value: Any, refs: Callable[[Any], Any]) -> Any:
        if isinstance(value, Ref):
            return refs(value)
        if isinstance(value, Attribute):
            return Attribute(self.name(value.name))
        if isinstance(value, slice):
            return slice(*(self.value(part, refs) for part in (value.start, value.stop, value.step)))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.value(part, refs) for part in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(part, refs) for part in value)
        if isinstance(value, dict):
            return {key: self.value(part, refs) for key, part in value.items()}
        return value

    def call(self, call: Call, refs: Callable[[Any], Any], storages: Mapping[int, int]) -> Call:
        made = Call.__new__(Call)
        made.__dict__.update(call.__dict__)
        made.__dict__.update(
            target=self.name(call.target) if call.kind == "module" else call.target,
            args=self.value(call.args, refs),
            kwargs=self.value(call.kwargs, refs),
            module=self.name(call.module),
            name=self.name(call.name),
            shapes=list(call.shapes),
            dtypes=list(call.dtypes),
            reads=[self.name(name) for name in call.reads],
            writes=[self.name(name) for name in call.writes],
            views=[self.name(name) for name in call.views],
            leaf=None if call.leaf is None else self.name(call.leaf),
            mutates=[storages[n] for n in call.mutates],
            storages=[storages[n] for n in call.storages],
            reads_storages=[storages[n] for n in call.reads_storages],
        )
        return made
