"""Where a model holds its parameters and buffers, ties included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn


class TensorHolder(NamedTuple):
    """A name of a parameter or buffer, and the module that holds it under ``key``."""

    name: str
    module: nn.Module
    key: str

    def get(self) -> Tensor:
        """Return what is there now."""
        tensor: Tensor = getattr(self.module, self.key)
        return tensor

    def set(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        setattr(self.module, self.key, tensor)


@dataclass(eq=False)
class TensorEntry:
    """One parameter or buffer; a tied one has several places."""

    tensor: Tensor
    places: list[TensorHolder] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first name in the order of the model."""
        return self.places[0].name

    @property
    def shown(self) -> str:
        """What messages call it."""
        return f"{self.name} (of {type(self.places[0].module).__name__})"

    @property
    def persistent(self) -> bool:
        """Whether state dicts hold it."""
        return any(holder.key not in holder.module._non_persistent_buffers_set for holder in self.places)

    def put(self, tensor: Tensor) -> None:
        """Put a tensor in all places."""
        for holder in self.places:
            if holder.get() is not tensor:
                holder.set(tensor)


def entries_of(model: nn.Module) -> list[TensorEntry]:
    """Return the parameters and buffers in the order of the model."""
    entries: dict[int, TensorEntry] = {}
    for owner, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                holder = TensorHolder(f"{owner}.{key}".lstrip("."), module, key)
                entries.setdefault(id(tensor), TensorEntry(tensor)).places.append(holder)
    return list(entries.values())


def replacement(old: Tensor, value: Tensor) -> Tensor:
    """Return a value as a parameter or buffer with the class and the attributes of the old one."""
    if value is old:
        return old
    new = value
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(value, old.requires_grad)
        new.__class__ = type(old)
    new.__dict__.update(old.__dict__)
    return new
