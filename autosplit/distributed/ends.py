"""How a process ends, and tells other processes of the same machine apart."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

_on_sigterm: list[Callable[[], None]] = []
"""What a thread calls on SIGTERM, once it waits for that."""


def machine() -> str:
    """Return what processes have in common that know each other by the same numbers."""
    namespace = "/proc/self/ns/pid"
    return f"{socket.gethostname()} {os.readlink(namespace) if os.path.lexists(namespace) else ''}"


def is_lost_connection(error: BaseException) -> bool:
    """Tell whether an error is but the effect of another process's end."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def uncaught() -> BaseException | None:
    """Return the exception that ends this process, None where its script has finished."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error


def exit_within(seconds: float) -> None:
    """End after some time, whatever the process does until then."""
    (timer := threading.Timer(seconds, os._exit, [1])).daemon = True
    timer.start()


def exit_now() -> None:
    """End at once, with what was printed."""
    (flush := threading.Thread(target=sys.stdout.flush, daemon=True)).start()
    flush.join(0.5)  # who hangs may hold its lock
    os._exit(1)


def call_on_sigterm(call: Callable[[], None]) -> None:
    """Have a thread call something on SIGTERM: a handler runs when the main thread does, not while that waits in gloo.

    Replaces the function of an earlier call. Does nothing if other code has set a wakeup descriptor for signals, as
    asyncio does. Forked processes handle their signals themselves.
    """
    if _on_sigterm:
        _on_sigterm[:] = [call]
        return
    seen, written = os.pipe()
    os.set_blocking(written, False)
    if (others := signal.set_wakeup_fd(written, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(others)
        os.close(seen)
        os.close(written)
        return

    def wait() -> None:
        while True:
            if signal.SIGTERM in os.read(seen, 1):
                _on_sigterm[0]()

    def let_go() -> None:
        if (now := signal.set_wakeup_fd(-1)) != written:
            signal.set_wakeup_fd(now)

    _on_sigterm.append(call)
    os.register_at_fork(after_in_child=let_go)
    threading.Thread(target=wait, name="autosplit signals", daemon=True).start()
