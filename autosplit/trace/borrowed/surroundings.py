"""What a forward may ask about its surroundings while it is recorded.

*Is this tensor fake?* transformers asks ``isinstance(x, torch._subclasses.FakeTensor)`` before it makes a mask, and
for a fake tensor makes one that costs attention its ``is_causal``. So the class of that name says no to all code but
torch's own, and torch's flags for compiling and exporting stay off: a library's Python takes the path of a plain call.
``torch._subclasses`` is private; nothing public says "run as always, on fake tensors". Tried with torch 2.13 and
transformers 5.23, whose questions are ``is_tracing`` and ``is_torchdynamo_compiling`` in ``utils/import_utils.py``.

*What is behind this tensor?* Its autograd node, on which no hook can be registered.

*Are gradients, or inference mode, on?* A recording is made with gradients on.

``torch.is_grad_enabled`` cannot be overridden by a mode, so it is replaced while the model runs; a module that took the
function itself (``from torch import is_grad_enabled``) is not heard. The same holds for
``torch.is_inference_mode_enabled``.

*Which rows are these?* Where a model runs on other rows than the sample's, what it takes on trust is checked.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import BaseTorchFunctionMode

from autosplit.trace.recording.recording import is_foreign, source_line


class GradModeWatch(contextlib.ExitStack):
    """Notes, in ``line``, where code outside of torch asked first; "" while none did."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ""
        self._own = threading.get_ident()

    def __enter__(self) -> Self:
        for name in ("is_grad_enabled", "is_inference_mode_enabled"):
            self.enter_context(patch.object(torch, name, partial(self._asked, getattr(torch, name))))
        return self

    def _asked(self, answer: Callable[[], bool]) -> bool:
        caller = sys._getframe(1).f_code.co_filename
        if not self.line and threading.get_ident() == self._own and not is_foreign(caller):
            self.line = source_line()
        return answer()


_TORCH = str(Path(torch.__file__).parent)


class _OfTorchOnly(type(FakeTensor)):  # type: ignore[misc]
    """Answers ``isinstance`` with the truth to torch's own code, with no to any other."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, FakeTensor) and sys._getframe(1).f_code.co_filename.startswith(_TORCH)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, FakeTensor) and sys._getframe(1).f_code.co_filename.startswith(_TORCH)


class _Unseen(FakeTensor, metaclass=_OfTorchOnly):
    """Stands under the name of FakeTensor."""


class _SeenNode:
    """Answers as an autograd node does, but for what registers hooks: these would be on the node of a fake tensor."""

    def __init__(self, node: Any, refuse: Callable[[str], Exception]) -> None:
        self._seen = node, refuse

    def __getattribute__(self, name: str) -> Any:
        node, refuse = object.__getattribute__(self, "_seen")
        if "hook" in name:
            raise refuse(f"calls {name} of an autograd node")
        value = getattr(node, name)
        return tuple((seen_node(n, refuse), i) for n, i in value) if name == "next_functions" else value

    def __eq__(self, other: Any) -> bool:
        return hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_seen")[0])


def seen_node(node: Any, refuse: Callable[[str], Exception]) -> Any:
    """Return what a forward is shown of a recorded tensor's node; ``refuse`` makes the exception for a hook."""
    return None if node is None else type(type(node).__name__, (_SeenNode,), {})(node, refuse)


def as_in_a_plain_call() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which fake tensors are not seen to be fake from outside of torch."""
    return patch.object(torch._subclasses, "FakeTensor", _Unseen)


_SPARSE = frozenset(getattr(torch, name) for name in dir(torch) if re.match("sparse_.*_tensor$", name))


class _Checked(BaseTorchFunctionMode):
    """Checks the counts and places of operations that were told not to: those of other rows may be out of bounds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "unsafe" in kwargs:
            kwargs = {**kwargs, "unsafe": False}
        if func in _SPARSE:
            kwargs = {**kwargs, "check_invariants": True}
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def on_other_rows() -> Iterator[None]:
    """Run operations as is right for any rows: with their checks, and encoder layers off their inference fast path.

    That one gives padded rows other values.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _Checked():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
