"""Progress bars on a terminal, made by rich; nothing where stderr is a file or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autosplit import progress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


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


@contextlib.contextmanager
def bars() -> Iterator[None]:
    """Show the phases of the work inside the block while they last, where stderr is a terminal that can."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") in (None, "", "dumb"):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    share = TaskProgressColumn(text_format_no_percentage="    ")
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(), share, TimeElapsedColumn())
    shown = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5)
    with shown, progress.listening(_Bars(shown)):
        yield
