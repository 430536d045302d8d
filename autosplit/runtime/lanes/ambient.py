"""The state that belongs to a thread, carried from the caller's thread to the lanes."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch

from autosplit.trace.inputs.signature import GradAutocastState

_SMALLEST_NORMAL = sys.float_info.min


@dataclass(frozen=True)
class ThreadState:
    """What a thread has of its own: grad and inference mode, autocast, mode stacks, denormals, context variables.

    Anomaly mode, the default dtype and torch's backend flags belong to the process; lanes see them anyway. Hooks on
    saved tensors stay with their thread: see :func:`needs_one_thread`.
    """

    grad: bool
    inference: bool
    ambient: GradAutocastState
    autocast_cache: bool
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    saved_hooks_refused: str | None
    flush_denormal: bool
    context: contextvars.Context = field(compare=False)

    @classmethod
    def current(cls) -> ThreadState:
        """Return the state of this thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            ambient=GradAutocastState.current(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            function_modes=tuple(overrides._get_current_function_mode_stack()),
            dispatch_modes=tuple(dispatch._get_current_dispatch_mode_stack()),
            saved_hooks_refused=torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
            flush_denormal=_SMALLEST_NORMAL / 2 == 0.0,
            context=contextvars.copy_context(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put a lane's thread, which has torch's defaults, in this state; the defaults come back at the end."""
        with contextlib.ExitStack() as stack:
            if self.flush_denormal != (_SMALLEST_NORMAL / 2 == 0.0):
                torch.set_flush_denormal(self.flush_denormal)
                stack.callback(torch.set_flush_denormal, not self.flush_denormal)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.grad != torch.is_grad_enabled():
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if any(state.enabled for state in self.ambient.autocast):
                stack.enter_context(self.autocast())
            if self.saved_hooks_refused is not None:
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(self.saved_hooks_refused))
            for mode in self.dispatch_modes:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode)
            for mode in self.function_modes:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            yield

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Enter the autocast state without clearing the cache of cast weights at the end: it is the process's own.

        The cast of a weight is then shared by all microbatches, and the caller's own context clears it.
        """
        before = GradAutocastState.current().autocast, torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        try:
            _set_autocast(self.ambient.autocast, self.autocast_cache)
            yield
        finally:
            _set_autocast(*before)
            torch.autocast_decrement_nesting()


def _set_autocast(states: tuple[Any, ...], cache: bool) -> None:
    for state in states:
        torch.set_autocast_enabled(state.device_type, state.enabled)
        torch.set_autocast_dtype(state.device_type, state.dtype)
    torch.set_autocast_cache_enabled(cache)


def graph_is_kept() -> bool:
    """Tell, inside a backward, whether the caller asked for ``retain_graph`` (or ``create_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_transformed() -> bool:
    """Tell whether a function transform (``torch.func``) or forward-mode differentiation is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def watched() -> bool:
    """Tell whether a mode of the caller's sees every operation, so that operations must not become others."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def may_hook_saved_tensors() -> bool:
    """Tell whether hooks on saved tensors may be set: a transform or the caller may have banned them."""
    return not is_transformed() and torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


def needs_one_thread() -> bool:
    """Tell whether all work has to stay in the caller's thread, in the order of the program.

    That is so under transforms, which see every operation, and under hooks on saved tensors:
    ``torch.utils.checkpoint`` knows a tensor by when it was saved.
    """
    return is_transformed() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def without_callers_modes() -> Iterator[None]:
    """Take the caller's dispatch modes, its hooks on saved tensors and a ban on such hooks away.

    What runs in here is not the caller's. Modes by which torch itself traces stay: the tensors may be theirs.
    """
    autograd = torch._C._autograd
    modes = []
    while (mode := dispatch._get_current_dispatch_mode()) is not None and not mode.is_infra_mode():
        modes.append(dispatch._pop_mode())
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    refused = autograd._saved_tensors_hooks_get_disabled_error_message()
    autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        for mode in reversed(modes):
            dispatch._push_mode(mode)
        if refused is not None:
            autograd._saved_tensors_hooks_disable(refused)
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def one_intra_op_thread(*, only: bool = True) -> Iterator[None]:
    """Compute with one thread, as the lanes do: how torch adds up, and with it the bits, depends on their number.

    ``only``: whether to do so at all.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1 if only else count)
    try:
        yield
    finally:
        torch.set_num_threads(count)
