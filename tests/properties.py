"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings


def examples(full: int, *, few: int = 10) -> int:
    """Return ``full`` under ``--hypothesis-profile=full``, as ``make test-all`` asks, and at most ``few`` without."""
    return full if settings.get_current_profile_name() == "full" else min(full, few)
