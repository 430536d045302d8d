"""The one question that every cost model answers."""

from __future__ import annotations

from typing import Protocol

from cost_models.work import OpWork


class CostModel(Protocol):
    """Anything that says how long an operation takes on its device."""

    def seconds(self, work: OpWork) -> float:
        """Return the time of ``work`` in seconds: finite, never negative, and no shorter for more of the same work."""
        ...
