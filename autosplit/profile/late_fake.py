"""A ``FakeTensorMode`` that is made when an operation needs it.

Making one imports torch's compiler, 0.7 seconds, for two settings of its own. Where all operations on fake tensors are
told (:mod:`autosplit.profile.quick_fake`), the mode is nothing but what they name as theirs.

Private torch API, used in this file only, tried on torch 2.13: ``FakeTensorMode`` and ``torch._functorch.config``.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import torch._functorch.config as settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.profile.quick_fake import QuickFake

_FOR_TENSORS = {
    "_allow_unsafe_data_ptr_access": "fake_tensor_allow_unsafe_data_ptr_access",
    "allow_meta": "fake_tensor_allow_meta",
}
"""What a fake tensor asks its mode for when it is made, and the setting that the mode has it from."""


class LateFakeMode(FakeTensorMode):
    """A mode whose attributes are there once somebody asks for one of them; it remembers nothing of operations."""

    def __init__(self) -> None:
        self.__dict__ |= {own: getattr(settings, name) for own, name in _FOR_TENSORS.items() if hasattr(settings, name)}

    def __getattr__(self, name: str) -> Any:
        """Make the mode, once, and return the attribute."""
        if "_made" in self.__dict__ or name.startswith("__"):
            raise AttributeError(name)
        self.__dict__["_made"] = True
        _import_apart("torch._dynamo", "torch.fx.experimental.symbolic_shapes")
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # slower than what runs above, and it forgets which results are one tensor
        return getattr(self, name)


def _import_apart(*names: str) -> None:
    """Import modules on a thread of its own.

    Errors that are caught in an import leave its frames, and those of its callers, until the collector comes: tensors
    of whatever runs now would seem to be alive for longer.
    """
    for name in names:
        if name not in sys.modules:
            thread = threading.Thread(target=importlib.import_module, args=(name,), daemon=True)
            thread.start()
            thread.join()


class FakeWorld(TorchDispatchMode):
    """Entered as a fake mode is: every operation that comes down to it runs under that mode, which is made then."""

    def __init__(self, mode: LateFakeMode, quick: QuickFake) -> None:
        """``quick`` stands above, and makes its new tensors in this mode."""
        super().__init__()
        self._mode, self._quick = mode, quick

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        self._quick.mode = self._mode
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._quick.mode = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._mode:
            return func(*args, **(kwargs or {}))
