"""Forwards that ask whether gradients or inference mode are on: a recording is made with gradients on.

``torch.is_grad_enabled`` cannot be overridden by a mode, so it is replaced while the model runs; a module that took the
function itself (``from torch import is_grad_enabled``) is not heard. The same holds for
``torch.is_inference_mode_enabled``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from autosplit.trace.recording import is_foreign, source_line


class GradModeWatch(AbstractContextManager[None]):
    """Notes, in ``line``, where code outside of torch asked first; "" while none did."""

    def __init__(self) -> None:
        self.line = ""
        self._own = threading.get_ident()
        names = ("is_grad_enabled", "is_inference_mode_enabled")
        self._patches = [patch.object(torch, name, partial(self._asked, getattr(torch, name))) for name in names]

    def __enter__(self) -> None:
        for each in self._patches:
            each.start()

    def __exit__(self, *_: Any) -> None:
        for each in self._patches:
            each.stop()

    def _asked(self, answer: Callable[[], bool]) -> bool:
        caller = sys._getframe(1).f_code.co_filename
        if not self.line and threading.get_ident() == self._own and not is_foreign(caller):
            self.line = source_line()
        return answer()
