"""A caret under the place of a text where it cannot be read."""

from __future__ import annotations

import unicodedata

_SHOWN = 60
"""How many characters stand on either side of a caret."""


def pointed(text: str, at: int, reason: str) -> str:
    """Return a reason, and below it the line of ``text`` with a caret under the character ``at``."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[start : len(text) if end < 0 else end]
    first = max(0, at - start - _SHOWN)
    before, after = line[first : at - start], line[at - start : at - start + _SHOWN]
    lead = "..." if first else ""
    return f"{reason}\n  {lead}{_shown(before)}{_shown(after)}\n  {' ' * (len(lead) + _width(before))}^"


def _shown(text: str) -> str:
    """Return text in which a terminal obeys nothing, as wide as `_width` says."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _width(text: str) -> int:
    """Return the columns that text takes: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
