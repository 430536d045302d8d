"""Functions that a recorded graph calls where a plain torch call would not say everything.

All are importable by name, so that graphs which use them can be printed, compiled and interpreted anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AutocastState:
    """Autocast of one device type: whether it is on, and its dtype."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class GradAutocastState:
    """The thread-local state under which an operation ran: grad mode and autocast."""

    grad: bool
    autocast: tuple[AutocastState, ...]

    @classmethod
    def current(cls) -> GradAutocastState:
        """Return the state of this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        states = (AutocastState(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return cls(torch.is_grad_enabled(), tuple(states))

    def differing(self, root: GradAutocastState) -> GradAutocastState:
        """Keep only the autocast states that are not the root's; the grad mode stays."""
        return GradAutocastState(self.grad, tuple(s for s in self.autocast if s not in root.autocast))


def under(ambient: GradAutocastState, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in the grad mode and autocast state in which it was recorded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(ambient.grad))
        for state in ambient.autocast:
            stack.enter_context(torch.autocast(state.device_type, dtype=state.dtype, enabled=state.enabled))
        return function(*args, **kwargs)


def invoke(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that has no importable name of its own."""
    return function(*args, **kwargs)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call a custom ``torch.autograd.Function`` as one operation, with its own backward."""
    return function.apply(*args)


def assign_buffer(buffers: dict[str, torch.Tensor | None], name: str, value: torch.Tensor) -> None:
    """Put a new tensor in a buffer's place, as the model did (``self.ema = ...``), in its module's table."""
    buffers[name] = value
