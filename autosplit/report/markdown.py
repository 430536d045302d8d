"""A plan as GitHub's markdown: for a pull request, an issue or a wiki."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autosplit.planning.plan import Plan
from autosplit.planning.timeline import StepTimeline
from autosplit.report.document import Column, Section, printable
from autosplit.report.sections import sections


def render_markdown(plan: Plan, *, measured: StepTimeline | None = None) -> str:
    """Return the report of ``plan`` as markdown; with a recorded step, beside that.

    It says what the text does, in tables without a width: all module names are there. Names that hold markup or HTML
    show as they are.
    """
    first, *others = sections(plan, width=None, measured=measured)
    parts = [_section(first, level=1), *(_section(section, level=2) for section in others)]
    return "\n\n".join(parts)


def _section(section: Section, *, level: int) -> str:
    blocks = [f"{'#' * level} {_text(section.title)}"]
    if section.verbatim:
        blocks.append("\n".join(["```text", *map(printable, section.verbatim), "```"]))
    if section.facts:
        blocks.append("\n".join(f"- **{_text(label)}**: {_text(text)}" for label, text in section.facts))
    if section.columns:
        blocks.append("\n".join(_table(section.columns)))
    if section.below:
        blocks.append("\n".join(f"{_text(line)}  " for line in section.below).rstrip())
    if section.points:
        blocks.append("\n".join(f"- {_text(point)}" for point in section.points))
    return "\n\n".join(blocks)


def _table(columns: tuple[Column, ...]) -> Iterator[str]:
    yield _row(column.title for column in columns)
    yield _row("---:" if column.align == "right" else ":---" for column in columns)
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield _row(_text(cell) for cell in cells)


def _row(cells: Iterator[str] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Return text in which nothing is markup."""
    plain = printable(" ".join(text.split("\n"))).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#@])", r"\\\1", plain)
