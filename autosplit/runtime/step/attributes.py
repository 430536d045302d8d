"""What hooks, and modules that run by their own Python, change of modules: attributes of stand-ins, and buffers.

before a cell   what is new in the module ─► its stand-in
behind it       what is new in the stand-in ─► the module; an error where the stage has replicas, for buffers too
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autosplit.errors import InputError, listed
from autosplit.trace.borrowed.values import difference, put
from autosplit.trace.inputs.objects import is_computed
from autosplit.trace.scope import has_hooks, is_layer

STANDS_FOR = "_stands_for"
_NOT_SHARED = {*nn.Module().__dict__, STANDS_FOR, "_is_replica"}
"""What the runtime itself puts into stand-ins, and the mode of a recording."""


@dataclass(frozen=True)
class StandsFor:
    """What a stand-in knows of its module; ``known`` are the attributes that both have."""

    module: nn.Module
    known: dict[str, Any]

    def move(self, source: nn.Module, target: nn.Module) -> None:
        """Set the attributes of ``target`` that are new in ``source``."""
        for name, value in self.new(source).items():
            for attributes in (vars(target), self.known):
                put(attributes, name, value)

    def new(self, source: nn.Module) -> dict[str, Any]:
        """Return the attributes that were set, and as `GONE` those that were deleted."""
        changes = difference(self.known, vars(source))
        return {name: value for name, value in changes.items() if name not in _NOT_SHARED}


class StandInAttributes:
    """Those modules of a stage on which attributes may be set that are stand-ins, and those whose buffers may change.

    Attributes:
        called: the stand-ins, and where the stage has replicas all such modules, by their names.
    """

    def __init__(self, region: Any, stage: int, *, replicas: int, everywhere: int) -> None:
        """``replicas`` are those of this process, ``everywhere`` those of all processes."""
        self._stage, self._replicas, self._everywhere = stage, replicas, everywhere
        self.called: dict[str, nn.Module] = {}
        for path, module in region.used().items():
            watched = isinstance(module, nn.Module) and (STANDS_FOR in vars(module) or everywhere > 1)
            if watched and (has_hooks(module) or not is_layer(module)):
                self.called[path] = module

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Share attributes with the model's modules.

        Raises InputError for one that is set, and for a buffer that is changed, where the stage has replicas: they run
        in no order, and those of other processes have buffers of their own.
        """
        stand_ins = {path: vars(each)[STANDS_FOR] for path, each in self.called.items() if STANDS_FOR in vars(each)}
        for path, entry in stand_ins.items():
            entry.move(entry.module, self.called[path])
        before = self._buffers()
        yield
        for path, name in [key for key, version in self._buffers().items() if before.get(key) != version]:
            self._refuse(path, f"change its buffer {name!r}")
        for path, entry in stand_ins.items():
            each = self.called[path]
            if self._replicas > 1 and (names := [n for n, v in entry.new(each).items() if not is_computed(each, n, v)]):
                self._refuse(path, f"set {listed(names)} on it")
            entry.move(each, entry.module)

    def _buffers(self) -> dict[tuple[str, str], Any]:
        """Return which tensor each buffer is, and how often it was changed; none where the stage has one replica."""
        named = ((p, n, b) for p, each in self.called.items() for n, b in each._buffers.items() if b is not None)
        return {(path, name): (id(b), b._version) for path, name, b in named} if self._everywhere > 1 else {}

    def _refuse(self, path: str, does: str) -> None:
        raise InputError(
            f"hooks or the forward of module {path!r} {does}, and the {self._everywhere} replicas of stage "
            f"{self._stage} run microbatches in no order; give that stage one replica, or keep such values outside of "
            "the module"
        )
