"""What a report consists of, sections of facts, tables and points, and how they print as text and as markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tabulate import tabulate

GAP = "  "
DEFAULT_WIDTH = 120
NARROWEST_WIDTH = 80
"""What a plan's memory table needs; a narrower page gets lines of this width."""


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, its cells from top to bottom, and on which side they line up.

    Text that does not print, such as a line break or a terminal's escape in a name, is shown as its escape.
    """

    title: str
    cells: tuple[str, ...]
    align: str = "right"

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
    return Column(title=title, cells=tuple(printable(cell(row)) for row in rows), align=align)


def printable(text: str) -> str:
    """Return text with what does not print as escapes: names in a plan file come from strangers."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def page_width(width: int | None) -> int:
    """Return the columns of text of a page for which ``width`` is asked."""
    return max(width or DEFAULT_WIDTH, NARROWEST_WIDTH)


def as_text(sections: Iterable[Section], *, width: int) -> str:
    """Return sections as text in lines of at most ``width`` columns, where their tables allow it."""
    return "\n\n".join("\n".join(_text_lines(section, width=width)) for section in sections)


def _text_lines(section: Section, *, width: int) -> Iterator[str]:
    yield from _wrap([section.title], width=width)
    yield from section.verbatim
    yield from _wrap((f"  {label:<10} {text}" for label, text in section.facts), width=width)
    if section.columns:
        yield from _text_table(section.columns)
    yield from _wrap(section.below, width=width)
    yield from _wrap((f"  - {point}" for point in section.points), width=width)


def _text_table(columns: Sequence[Column]) -> list[str]:
    titles = [column.title for column in columns]
    rules = ["-" * column.width for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    align = [column.align for column in columns]
    text = tabulate([titles, rules, *rows], tablefmt="plain", colalign=align, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def _wrap(lines: Iterable[str], *, width: int) -> list[str]:
    """Break lines that are too long; the rest goes below their own text, so that the labels stay in the margin."""
    wrapped: list[str] = []
    for line in lines:
        label = re.match(r"  (?:- |\S+ +)", line)
        indent = " " * label.end() if label else ""
        text = printable(" ".join(line.split("\n")))
        wrapped += textwrap.wrap(text, width=width, subsequent_indent=indent, break_on_hyphens=False)
    return wrapped


def as_markdown(sections: Iterable[Section]) -> str:
    """Return sections as GitHub's markdown; names that hold markup or HTML show as they are."""
    return "\n\n".join(_markdown_section(section, level=2 if index else 1) for index, section in enumerate(sections))


def _markdown_section(section: Section, *, level: int) -> str:
    blocks = [f"{'#' * level} {_plain(section.title)}"]
    if section.verbatim:
        blocks.append("\n".join(["```text", *map(printable, section.verbatim), "```"]))
    if section.facts:
        blocks.append("\n".join(f"- **{_plain(label)}**: {_plain(text)}" for label, text in section.facts))
    if section.columns:
        blocks.append("\n".join(_markdown_table(section.columns)))
    if section.below:
        blocks.append("\n".join(f"{_plain(line)}  " for line in section.below).rstrip())
    if section.points:
        blocks.append("\n".join(f"- {_plain(point)}" for point in section.points))
    return "\n\n".join(blocks)


def _markdown_table(columns: tuple[Column, ...]) -> Iterator[str]:
    yield _markdown_row(column.title for column in columns)
    yield _markdown_row("---:" if column.align == "right" else ":---" for column in columns)
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield _markdown_row(_plain(cell) for cell in cells)


def _markdown_row(cells: Iterator[str] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Return text in which nothing is markup."""
    plain = printable(" ".join(text.split("\n"))).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#@])", r"\\\1", plain)
