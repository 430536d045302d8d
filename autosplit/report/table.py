"""A plan as text, for a page of so many columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from tabulate import tabulate

from autosplit.planning.plan import Plan
from autosplit.planning.timeline import StepTimeline
from autosplit.report.document import Column, Section, printable
from autosplit.report.sections import sections

DEFAULT_WIDTH = 120
NARROWEST_WIDTH = 80
"""What the memory table needs; a narrower page gets lines of this width."""


def render(plan: Plan, *, width: int | None = None, measured: StepTimeline | None = None) -> str:
    """Return the partition report of ``plan`` as text; with a recorded step, beside that.

    Lines are at most ``width`` columns wide (120 when None) where that is 80 or more. Bytes are in binary units; times
    are per microbatch where the table says so and per step elsewhere.
    """
    page = max(width or DEFAULT_WIDTH, NARROWEST_WIDTH)
    parts = sections(plan, width=page, measured=measured)
    return "\n\n".join("\n".join(_lines(section, width=page)) for section in parts)


def _lines(section: Section, *, width: int) -> Iterator[str]:
    yield from _wrap([section.title], width=width)
    yield from section.verbatim
    yield from _wrap((f"  {label:<10} {text}" for label, text in section.facts), width=width)
    if section.columns:
        yield from _table(section.columns)
    yield from _wrap(section.below, width=width)
    yield from _wrap((f"  - {point}" for point in section.points), width=width)


def _table(columns: Sequence[Column]) -> list[str]:
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
