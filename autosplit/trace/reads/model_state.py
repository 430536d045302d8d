"""A model's state at one moment, and what of it is another later on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autosplit.trace.borrowed import side_effects, state
from autosplit.trace.borrowed.contents import Place
from autosplit.trace.borrowed.holders import Holders


class ModelState:
    """What a run of a model, or of a module in it, may change besides what it is given and returns."""

    def __init__(self, model: nn.Module, holders: Holders | None) -> None:
        self.model, self.holders = model, holders
        self.tensors = {name: (t, t._version, t.data) for name, t in self._registered()}
        self.gradients = self._gradients()
        self.python = [] if holders is None else holders.read()
        self.drawn = state.random_states()[1]

    def changes(self) -> tuple[frozenset[Place], str, list[str]]:
        """Return where Python state is another now, why rows may not be told apart for it, and the tensors written to.

        The tensors are parameters and buffers, by name.
        """
        places, whole = frozenset[Place](), ""
        if self.holders is not None:
            changed = side_effects.changes(self.holders, self.python)
            places = changed.without(lambda holder, key, value: holder.place[1] == "_buffers").places
        if places:
            whole = f"it changes the Python attribute {min(places)[1]!r}"
        elif self.gradients != self._gradients():
            whole = "it computes gradients of parameters"
        elif self.drawn != state.random_states()[1]:
            whole = "it draws random numbers in Python"
        return places, whole, [name for name, tensor in self._registered() if self._is_other(name, tensor)]

    def set_up(self) -> list[Any]:
        """Return what is another now than then, in Python and of what tensors lie in."""
        changed = side_effects.changes(self.holders, self.python).entries if self.holders is not None else ()
        memory = {name: tensor.data for name, tensor in self._registered() if self._is_other(name, tensor)}
        return [memory, *((holder.place, entries) for holder, _, entries in changed)]

    def restore(self) -> None:
        """Have Python state, and what tensors lie in, as it was then."""
        if self.holders is not None:
            self.holders.write(self.python)
        for tensor, _, data in self.tensors.values():
            if not state.is_on(tensor, data):
                tensor.data = data

    def _is_other(self, name: str, tensor: torch.Tensor) -> bool:
        before, version, data = self.tensors.get(name, (None, 0, tensor))
        return before is not tensor or tensor._version != version or not state.is_on(tensor, data)

    def _registered(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def _gradients(self) -> list[tuple[int, int] | None]:
        gradients = (parameter.grad for parameter in self.model.parameters())
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def is_equal(first: Any, other: Any, depth: int = 8) -> bool:
    """Tell whether two values are one, or alike in all that they hold."""
    if first is other or type(first) is not type(other) or not depth:
        return first is other
    if isinstance(first, torch.Tensor):
        return first.dtype == other.dtype and torch.equal(first, other)
    if isinstance(first, dict):
        first, other = [*first.items()], [*other.items()]
    if isinstance(first, (list, tuple)):
        return len(first) == len(other) and all(is_equal(a, b, depth - 1) for a, b in zip(first, other, strict=True))
    return is_equal(vars(first), vars(other), depth - 1) if hasattr(first, "__dict__") else bool(first == other)
