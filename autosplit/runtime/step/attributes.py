"""Attributes that hooks, and modules that run by their own Python, set on stand-ins of the model's modules.

before a cell   what is new in the module ─► its stand-in
behind it       what is new in the stand-in ─► the module; an error where the stage has replicas
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError, listed
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
        """Set the attributes of one that are new in the other."""
        new = self.new(source)
        for name in new.keys() - vars(source).keys():
            vars(target).pop(name, None)
            del self.known[name], new[name]
        vars(target).update(new)
        self.known.update(new)

    def new(self, source: nn.Module) -> dict[str, Any]:
        """Return the attributes that were set, and as None those that were deleted."""
        now, known = vars(source), self.known
        names = [name for name in known | now if name not in _NOT_SHARED]
        return {name: now.get(name) for name in names if known.get(name, self) is not now.get(name, self)}


class StandInAttributes:
    """The stand-ins among a stage's modules on which attributes may be set; none where it runs the model's own."""

    def __init__(self, region: Any, *, stage: int, replicas: int) -> None:
        self._stage, self._replicas = stage, replicas
        self.stand_ins: dict[str, nn.Module] = {}
        for path in dict.fromkeys(path for _, path in region.named() if path):
            parent, _, name = path.rpartition(".")
            called = region.root.get_submodule(parent)._modules.get(name)
            for place, module in () if called is None else called.named_modules(prefix=path):
                if STANDS_FOR in vars(module) and (has_hooks(module) or not is_layer(module)):
                    self.stand_ins[place] = module

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Share attributes with the model's modules.

        Raises InputError for one that is set where the stage has replicas, which run in no order.
        """
        for each in self.stand_ins.values():
            (own := vars(each)[STANDS_FOR]).move(own.module, each)
        yield
        for path, each in self.stand_ins.items():
            own = vars(each)[STANDS_FOR]
            if self._replicas > 1 and (names := [n for n, v in own.new(each).items() if not _is_weight(each, n, v)]):
                raise InputError(
                    f"hooks or the forward of module {path!r} set {listed(names)} on it, and the "
                    f"{self._replicas} replicas of stage {self._stage} run microbatches in no order; give that stage "
                    "one replica, or keep such values outside of the module"
                )
            own.move(each, own.module)


def _is_weight(module: nn.Module, name: str, value: Any) -> bool:
    """Tell whether a hook computes a tensor from parameters, as old weight norms do: ``weight`` of ``weight_g``."""
    return isinstance(value, torch.Tensor) and any(own.startswith(f"{name}_") for own in module._parameters)
