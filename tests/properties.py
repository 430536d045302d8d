"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings

_FEW = 25


def examples(full: int) -> int:
    """Return ``full`` under ``--hypothesis-profile=full``, which ``make test-all`` asks for, and at most 25 without."""
    return full if settings.get_current_profile_name() == "full" else min(full, _FEW)
