"""What the value probe has found out about a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Findings:
    """Names of the nodes that the value probe has seen, and of those in which rows influence each other."""

    probed: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
