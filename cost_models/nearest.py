"""Which of the known names someone may have meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_MOST = 5
_LEAST_LIKENESS = 0.5
_PART = re.compile(r"[a-z]{2,}(?=\d{3,})|[a-z]*\d+[a-z]*|[a-z]{2,}")
_SAID_OF_MANY = frozenset(("nvidia", "amd", "tesla", "geforce", "instinct", "gpu", "dgx", "hgx"))


def nearest(name: str, *, among: Iterable[str]) -> list[str]:
    """Return the known names nearest to ``name``, the best first: those with most of its parts, else alike ones."""
    known = list(among)
    parts = [part for part in _parts(name) if part not in _SAID_OF_MANY]
    shared = {entry: sum(part in _squashed(entry) for part in parts) for entry in known}
    alike = {entry: _likeness("".join(parts), entry) for entry in known}
    most = max(shared.values(), default=0)
    found = [entry for entry in known if shared[entry] == most and (most or alike[entry] >= _LEAST_LIKENESS)]
    return sorted(found, key=lambda entry: (-alike[entry], entry))[:_MOST]


def _likeness(wanted: str, entry: str) -> float:
    """Return how much of a known name, or of its part before the first hyphen, someone wrote: 1 for all of it."""
    texts = (_squashed(entry), _squashed(entry.partition("-")[0]))
    return max(SequenceMatcher(None, wanted, text).ratio() for text in texts)


def _parts(name: str) -> list[str]:
    """Return what a name is made of: ``RTX 4090`` and ``rtx4090`` have the same parts."""
    return [
        part for part in re.findall(r"[a-z]{2,}(?=\d{3,})|[a-z]*\d+[a-z]*|[a-z]{2,}", name.lower()) if len(part) > 1
    ]


def _squashed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
