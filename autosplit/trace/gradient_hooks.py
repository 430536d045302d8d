"""Hooks that a forward registers on its own values: operations whose backward is the hook.

A hook that only returns another gradient is part of the graph, and the value probe asks its backward for mixed rows.
One that returns nothing, or that changes attributes, is there for what it does besides: it has to run once per
backward, so the module that registers it sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autosplit.trace import side_effects, state
from autosplit.trace.calls import apply_function
from autosplit.trace.holders import Holders
from autosplit.trace.recording import Ref, Refusal, refs_in, source_line

if TYPE_CHECKING:
    from autosplit.trace.record import Recorder

Hook = Callable[[torch.Tensor], Any]


class Hooked(torch.autograd.Function):
    """The identity, whose gradient goes through a hook."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, hook: Hook) -> torch.Tensor:
        """Return the value as another tensor."""
        ctx.hook = hook
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return what the hook makes of the gradient."""
        changed = ctx.hook(gradients[0])
        return (gradients[0] if changed is None else changed), None


class _Handle:
    """Stands for the handle of a hook while the model is recorded."""

    def __init__(self, module: str) -> None:
        self._module = module

    def remove(self) -> None:
        """Refuse: the hook is part of the graph."""
        raise Refusal("forward removes a hook that it registered", self._module, whole="it removes a hook")


def record_hook(recorder: Recorder, value: torch.Tensor, hook: Hook) -> _Handle:
    """Record that a forward registers a hook on a value; what the hook's operation gives stands for the value."""
    reference = recorder.reference(value)
    assert isinstance(reference, Ref)
    where = f"module {recorder.path!r}" if recorder.path else "the model's own forward"
    place = f"{where} registers a hook ({source_line()})"
    if any(
        ref == reference for call in recorder.calls[reference.index + 1 :] for ref in refs_in((call.args, call.kwargs))
    ):
        raise Refusal(f"{place} on a value that was used before", recorder.path, whole="it registers a hook")
    if (reason := _acts(recorder, value, hook)) is not None:
        raise Refusal(
            f"{place} that {reason}; a graph runs hooks by microbatch", recorder.path, whole=f"its hook {reason}"
        )
    out = recorder.perform(
        "function",
        apply_function,
        "register_hook",
        lambda: Hooked.apply(value, hook),
        (Hooked, value, hook),
        {},
    )
    recorder.stand_for(value, recorder.recorded()[id(out)])
    return _Handle(recorder.path)


def _acts(recorder: Recorder, value: torch.Tensor, hook: Hook) -> str | None:
    """Return what a hook does beside returning a gradient; None for nothing that is seen."""
    holders = Holders([recorder.model], [hook])
    before = holders.read()
    try:
        with _disable_current_modes(), recorder.muted(), state.random_state():
            changed = hook(torch.randn(value.shape, dtype=value.dtype))
    except Exception as error:
        return f"does not run by itself ({type(error).__name__}: {error})"
    if not isinstance(changed, torch.Tensor):
        return "returns no gradient"
    return "changes Python state" if side_effects.changes(holders, before) else None
