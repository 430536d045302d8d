"""What the value probe has found out about a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Findings:
    """Names of the nodes that the value probe has seen, and of those in which rows influence each other.

    In ``backward`` they influence each other's gradients only, which no later operation puts right. The findings hold
    where the inputs' batch dimensions are ``batch_dims``.
    """

    probed: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    backward: frozenset[str] = frozenset()
    batch_dims: tuple[int | None, ...] = ()

    def joined(self, later: Findings) -> Findings:
        """Return these findings and later ones together."""
        return Findings(
            self.probed | later.probed,
            self.suspects | later.suspects,
            self.backward | later.backward,
            later.batch_dims,
        )
