"""Forwards that ask whether gradients are on: a recording is made with them on, whatever its caller has.

``torch.is_grad_enabled`` cannot be overridden by a mode, so it is replaced while the model runs; a module that took the
function itself (``from torch import is_grad_enabled``) is not heard.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from autosplit.trace.recording import is_foreign, source_line


class GradModeWatch(AbstractContextManager[None]):
    """Notes, in ``line``, where code outside of torch asked first; "" while none did."""

    def __init__(self) -> None:
        self.line = ""
        self._known, self._own = torch.is_grad_enabled, threading.get_ident()
        self._patch = patch.object(torch, "is_grad_enabled", self._asked)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()

    def _asked(self) -> bool:
        caller = sys._getframe(1).f_code.co_filename
        if not self.line and threading.get_ident() == self._own and not is_foreign(caller):
            self.line = source_line()
        return self._known()
