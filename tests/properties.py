"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings


def examples(whole: int, *, few: int = 10) -> int:
    """Return ``whole`` in a campaign, an eighth of it in a full run, and at most ``few`` in a quick run.

    The profile of hypothesis says which it is; an eighth is at least as many as ``few``.
    """
    few = min(whole, few)
    return {"campaign": whole, "full": max(few, whole // 8)}.get(settings.get_current_profile_name(), few)
