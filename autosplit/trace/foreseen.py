"""The first recording without most of a model's equal blocks: what they do is foreseen, and checked on another core.

    blocks.0  runs       blocks.1  runs, the same calls       blocks.2, ...  twins of blocks.0: its calls once more

All of it is compared with the recording in which every block ran; see :func:`autosplit.trace.gather.gather`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import nn

from autosplit.trace.calls import Ambient
from autosplit.trace.recording import Attribute, Call, Recording, Ref
from autosplit.trace.repeats import Repeats, Segment, form_of
from autosplit.trace.scope import Scope
from autosplit.trace.twins import Twins

_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_COMPARED = frozenset((int, str, bool, Ref, Attribute))
_WORTH = 8
"""Modules of one class in one list below which a child is not worth it."""


class Unforeseen(Exception):
    """Another recording of the model would not be, or was not, the one that was foreseen."""


def may_foresee(model: nn.Module) -> bool:
    """Tell whether a model is on meta and has a list of many modules of one class."""
    lists = (module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    counts = (count for members in lists for count in Counter(map(type, members)).values())
    return max(counts, default=0) >= _WORTH and all(parameter.is_meta for parameter in model.parameters())


class Foreseen(Repeats):
    """Runs the members of lists until two did the same, and takes for those that cannot differ what the first one did.

    Attributes:
        found: maps modules that did not run to those that did what they would have done.
    """

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        self.own = Twins(model)
        self._named = (*scope.atoms, *scope.entered)
        super().__init__({}, twins=self.own)
        self.found: dict[str, str] = {}
        self._classes = {path: type(module) for path, module in model.named_modules()}
        self._ran: dict[type, list[tuple[Segment, Any]]] = defaultdict(list)
        self._seen_twice: dict[type, dict[str, Segment]] = defaultdict(dict)

    def like(self, path: str, kinds: Any) -> Segment | None:
        """Return the run of another module of which this one is a twin, where a third one did what that did."""
        for like in self._seen_twice[self._classes[path]].values():
            if not _in_list(path) or like.kinds != kinds or self._told(path) != self._told(like.path):
                continue
            if self.own.same(like.path, path):
                self.found[path] = like.path
                return like
        return None

    def ran(self, calls: Sequence[Call], segment: Segment) -> None:
        """Take notice of a run of an entered module."""
        form = form_of(calls, segment) if _in_list(segment.path) else None
        if form is None:
            return
        kind = self._classes[segment.path]
        before = self._ran[kind]
        like = next((s for s, other in before if s.kinds == segment.kinds and other == form), None)
        if like is None:
            before.append((segment, form))
        else:
            self._seen_twice[kind][like.path] = like

    def _told(self, path: str) -> frozenset[str]:
        """Return of which modules inside of one the scope says what becomes of them."""
        return frozenset(name[len(path) :] for name in self._named if name == path or name.startswith(f"{path}."))

    def check(self, recording: Recording, alike: Mapping[str, str]) -> None:
        """Raise Unforeseen where it is plain that a recording with all blocks would be another one.

        So it is with blocks that assign buffers, or are called again, and with objects that each call makes anew.
        """
        names = {call.name for call in recording.calls}
        if len(names) != len(recording.calls) or not self.found.items() <= alike.items():
            raise Unforeseen
        if not all(map(_lasts, recording.constants.values())):
            raise Unforeseen


def _in_list(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _lasts(constant: Any) -> bool:
    """Tell whether a constant is the same, or equal, in another recording."""
    if isinstance(constant, FunctionType):
        return getattr(sys.modules.get(constant.__module__), constant.__qualname__, None) is constant
    return isinstance(constant, (torch.Tensor, Ambient, type, *_BUILT_IN))


def same(one: Recording, other: Recording) -> bool:
    """Tell whether two recordings of a model are the same in all but its runs of modules."""
    calls = _same([vars(call) for call in one.calls], [vars(call) for call in other.calls])
    if not calls or not _same(one.constants, other.constants) or not _same(one.output, other.output):
        return False
    return one.unflatten == other.unflatten


def _same(one: Any, other: Any) -> bool:
    """Tell whether two nested values are the same, their types too; tensors only where they are one."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if type(one) in _COMPARED:
        return bool(one == other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(part, other[key]) for key, part in one.items())
    if isinstance(one, slice):
        return _same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    if dataclasses.is_dataclass(one):
        return _same(vars(one), vars(other))
    return bool(one == other)
