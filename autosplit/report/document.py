"""What a report consists of, whatever it is printed as: sections of facts, tables and points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, its cells from top to bottom, and on which side they line up.

    Text that does not print, such as a line break or a terminal's escape in a name, is shown as its escape.
    """

    title: str
    cells: tuple[str, ...]
    align: str = "right"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(printable(cell) for cell in self.cells))

    @property
    def width(self) -> int:
        """Columns of text that it takes."""
        return max(map(len, (self.title, *self.cells)))


@dataclass(frozen=True)
class Section:
    """A title and what stands below it, in this order.

    Attributes:
        verbatim: lines as they are, such as the schedule's grid.
        facts: labels and what they say.
        columns: a table.
        below: lines below the table.
        points: a list.
    """

    title: str
    verbatim: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[Column, ...] = ()
    below: tuple[str, ...] = ()
    points: tuple[str, ...] = ()


def room_beside(columns: Sequence[Column], *, width: int | None) -> int | None:
    """Return the columns of text that a page of ``width`` leaves beside a table; None where the page has no width."""
    return None if width is None else width - table_width(columns) - len(GAP)


def table_width(columns: Sequence[Column]) -> int:
    """Return how wide a table of text is."""
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)


def column(title: str, rows: Sequence[object], cell: Callable[..., str], *, align: str = "right") -> Column:
    """Return the column with a cell per row."""
    return Column(title=title, cells=tuple(cell(row) for row in rows), align=align)


def printable(text: str) -> str:
    """Return text with what does not print as escapes: names in a plan file come from strangers."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
