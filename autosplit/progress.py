"""Phases of long work: bars on a terminal, made by rich; else a line each, or entries of the logger ``autosplit``.

    with phase("measuring", total=len(nodes)):
        for done, node in enumerate(nodes):
            update(done)

`phase` decorates functions too. Phases may lie inside each other; `update` speaks of the innermost.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LOG = logging.getLogger("autosplit")
_BARS: ContextVar[Progress | None] = ContextVar("autosplit_bars", default=None)
_LINES: ContextVar[_Lines | None] = ContextVar("autosplit_lines", default=None)
_QUIET_S = 1.0
"""Work that is done after so long is not told in lines."""
_TASK: ContextVar[TaskID | None] = ContextVar("autosplit_task", default=None)


@contextmanager
def phase(name: str, *, total: int | None = None, level: int = logging.DEBUG) -> Iterator[None]:
    """Show work of this name while the block or the decorated function runs; ``total``: what it counts up to."""
    shown = _BARS.get()
    if shown is None:
        started, told = time.perf_counter(), _LINES.get()
        if told is not None:
            told.begin(name)
        _LOG.log(level, "%s", name)
        yield
        _LOG.log(level, "%s: %.1f s", name, time.perf_counter() - started)
        return
    task = shown.add_task(name, total=total)
    token = _TASK.set(task)
    try:
        yield
    finally:
        _TASK.reset(token)
        shown.remove_task(task)


def update(done: int, total: int | None = None) -> None:
    """Tell how much of the innermost phase is done, and of how much where that was not known before."""
    shown, task = _BARS.get(), _TASK.get()
    if shown is not None and task is not None:
        shown.update(task, completed=done, total=total)


@contextmanager
def shown(name: str) -> Iterator[None]:
    """Show work of this name and its phases while it lasts: on a terminal, or at level INFO of the log."""
    with bars(), phase(name, level=logging.INFO):
        yield


class _Lines:
    """The phases that have begun: each is told once on stderr, with the seconds until it began."""

    def __init__(self) -> None:
        self.started, self.told, self.waiting = time.perf_counter(), set[str](), list[str]()

    def begin(self, name: str) -> None:
        """Tell that a phase begins; those of the first second when it is over."""
        if name in self.told:
            return
        since_s = time.perf_counter() - self.started
        self.told.add(name)
        self.waiting.append(f"{since_s:6.1f} s  {name}")
        if since_s >= _QUIET_S:
            print("\n".join(self.waiting), file=sys.stderr, flush=True)
            self.waiting.clear()


@contextmanager
def lines() -> Iterator[None]:
    """Tell each phase inside the block in a line of stderr, once; on a terminal show bars instead."""
    token = _LINES.set(_Lines())
    try:
        with bars():
            yield
    finally:
        _LINES.reset(token)


@contextmanager
def bars() -> Iterator[None]:
    """Show the phases inside the block as lines of stderr, where that is a terminal and none are shown yet."""
    if _BARS.get() is not None or not _on_terminal():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    share = TaskProgressColumn(text_format_no_percentage="    ")
    shown = Progress(
        *(SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(), share, TimeElapsedColumn()),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=5,
        redirect_stdout=sys.stdout is sys.stderr,  # what a model prints stays where it was sent
    )
    with shown:
        token = _BARS.set(shown)
        try:
            yield
        finally:
            _BARS.reset(token)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
