"""Where phases of long work are shown: bars on a terminal, made by rich; `logging` elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autosplit import progress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LOG = logging.getLogger("autosplit")


class _Task:
    """A phase as a line of rich's."""

    def __init__(self, shown: Progress, task: TaskID) -> None:
        self.shown, self.task = shown, task

    def moved(self, done: int, total: int | None) -> None:
        """Move the bar."""
        if total is None:
            self.shown.update(self.task, completed=done)
        else:
            self.shown.update(self.task, completed=done, total=total)

    def ended(self) -> None:
        """Remove the line."""
        self.shown.remove_task(self.task)


class _Bars:
    """The lines of all phases that are under way, outermost first."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown

    def began(self, name: str, total: int | None) -> _Task:
        """Add a line."""
        return _Task(self.shown, self.shown.add_task(name, total=total))


class _Logged:
    """A phase as two entries of the log."""

    def __init__(self, name: str, level: int) -> None:
        self.name, self.level, self.start_s = name, level, time.perf_counter()
        _LOG.log(level, "%s", name)

    def moved(self, done: int, total: int | None) -> None:
        """Log nothing."""

    def ended(self) -> None:
        """Log how long it took."""
        _LOG.log(self.level, "%s: %.1f s", self.name, time.perf_counter() - self.start_s)


class _Log:
    """Writes to the logger ``autosplit``: the first phase with level INFO, those inside it with DEBUG."""

    level = logging.INFO

    def began(self, name: str, total: int | None) -> _Logged:
        """Log that a phase begins."""
        level, self.level = self.level, logging.DEBUG
        return _Logged(name, level)


@contextlib.contextmanager
def shown(name: str) -> Iterator[None]:
    """Show work of this name and its phases while it lasts, unless somebody listens already.

    On a terminal that is a line on stderr, elsewhere the logger ``autosplit``.
    """
    with contextlib.ExitStack() as stack:
        if not progress.has_listener():
            stack.enter_context(bars() if _on_a_terminal() else progress.listening(_Log()))
        stack.enter_context(progress.phase(name))
        yield


@contextlib.contextmanager
def bars() -> Iterator[None]:
    """Show the phases of the work inside the block while they last, where stderr is a terminal that can."""
    if not _on_a_terminal():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    share = TaskProgressColumn(text_format_no_percentage="    ")
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(), share, TimeElapsedColumn())
    shown = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=5,
        redirect_stdout=sys.stdout is sys.stderr,  # what a model prints stays where it was sent
    )
    with shown, progress.listening(_Bars(shown)):
        yield


def _on_a_terminal() -> bool:
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    return os.environ.get("TERM") not in (None, "", "dumb")
