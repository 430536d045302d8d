"""Ctrl-C, and the signals by which a system ends a command: the work is unwound, children and half files with it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
_UNTOUCHED = (signal.default_int_handler, signal.SIG_DFL)
"""What handles a signal where nobody has said otherwise, as nohup does."""


class Interrupts:
    """What those signals do: as Python's Ctrl-C, and it is remembered, as modules being imported may swallow it."""

    def __init__(self) -> None:
        self.seen: signal.Signals | None = None

    def __call__(self, number: int, _: object) -> None:
        """Handle a signal."""
        self.seen = self.seen or signal.Signals(number)
        raise KeyboardInterrupt

    @property
    def word(self) -> str:
        """What to say of it."""
        return _WORDS[(self.seen or signal.SIGINT).name]

    @property
    def exit_code(self) -> int:
        """The exit code: 130 for Ctrl-C, 143 for SIGTERM, as shells have it for processes that signals end."""
        return 128 + (self.seen or signal.SIGINT)

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Heed the signals inside the block, in the main thread, and none that is handled or ignored already."""
        names = _WORDS if threading.current_thread() is threading.main_thread() else {}
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in numbers}
        ours = {number: old for number, old in before.items() if old in _UNTOUCHED}
        try:
            for number in ours:
                signal.signal(number, self)
            yield
        finally:
            for number, old in ours.items():
                signal.signal(number, old)


def go_on() -> None:
    """Raise KeyboardInterrupt where one of the signals came and something swallowed it."""
    handlers = (signal.getsignal(getattr(signal, name)) for name in _WORDS if hasattr(signal, name))
    if any(isinstance(handler, Interrupts) and handler.seen for handler in handlers):
        raise KeyboardInterrupt
