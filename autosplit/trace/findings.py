"""What the value probe has found out about a model, and how a plan keeps it; without torch, as plans are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autosplit.trace.run import FlatInputs


@dataclass(frozen=True)
class Findings:
    """Names of the nodes that the value probe has seen, and of those in which rows influence each other.

    In ``mixing`` no later operation puts it right: an operation by itself, or its backward, mixes rows. They hold
    where the inputs' batch dimensions are ``batch_dims``.
    """

    probed: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    mixing: frozenset[str] = frozenset()
    batch_dims: tuple[int | None, ...] = ()

    def joined(self, later: Findings) -> Findings:
        """Return these findings and later ones together."""
        return Findings(
            self.probed | later.probed,
            self.suspects | later.suspects,
            self.mixing | later.mixing,
            later.batch_dims,
        )


@dataclass(frozen=True)
class Proof:
    """A recording by its identity, and the nodes in which its value probe saw rows influence each other."""

    recording: str
    values: tuple[str, ...] = ()
    mixing: tuple[str, ...] = ()

    def findings(self, names: frozenset[str], flat: FlatInputs) -> Findings:
        """Return what the probe found, for the nodes of the recording."""
        return Findings(names, frozenset(self.values), frozenset(self.mixing), flat.batch_dims)

    @classmethod
    def of(cls, recording: str, findings: Findings) -> Proof:
        """Write down what was found about a recording."""
        return cls(recording, tuple(sorted(findings.suspects)), tuple(sorted(findings.mixing)))
