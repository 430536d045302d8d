"""What a kernel holds beside its results, and the text that tells one kind of operation from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Source = Literal["formula", "measured", "unknown"]


@dataclass(frozen=True)
class Workspace:
    """Scratch of one kernel: bytes that live only while it runs, beside its results.

    ``source``: "formula" follows from what the library does; "measured" was observed; "unknown" is a guess for a kernel
    that surely needs some, and widens what is printed.
    """

    bytes: int
    source: Source


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements, were it contiguous; 0 for None."""
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


def operation_key(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an aten operation as text: its name, and shapes, layouts and dtypes of all that it is given.

    Equal text, equal kernel, on one device with one set of libraries; what is in tensors is left out.
    """
    named = [f"{key}={_told(value)}" for key, value in sorted(kwargs.items())]
    return f"{name}({', '.join([*map(_told, args), *named])})"


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = "x".join(map(str, value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.is_contiguous() else f"/{'x'.join(map(str, value.stride()))}"
        return f"{dtype}[{size}]{layout}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, (torch.Generator, torch.device)):
        return type(value).__name__
    return str(value)
