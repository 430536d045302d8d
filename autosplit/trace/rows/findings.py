"""What the value probe has found out about a model, and how a plan keeps it; without torch, as plans are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def key_of_opaque(name: str, module: nn.Module) -> str:
    """Return the name of an opaque module's node and the module's mode: its Python may read values in one mode only."""
    return f"{name} in {'training' if module.training else 'eval'}"


@dataclass(frozen=True)
class Findings:
    """What the value probe found for the nodes of a recording, by name.

    ``suspects``: rows are out of order, numbered, or influence each other. ``mixing``: rows influence each other, and
    no later operation undoes it. ``alone``: nodes that read values and still treat each row by itself. ``probed``:
    whether there were values to probe.
    """

    probed: bool = False
    suspects: frozenset[str] = frozenset()
    mixing: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Proof:
    """A recording by its identity, and the nodes in which its value probe saw rows influence each other."""

    recording: str
    values: tuple[str, ...] = ()
    mixing: tuple[str, ...] = ()

    def findings(self) -> Findings:
        """Return what the probe found; a recording with opaque modules has no proof."""
        return Findings(True, frozenset(self.values), frozenset(self.mixing))

    @classmethod
    def of(cls, recording: str, findings: Findings) -> Proof:
        """Write down what was found about a recording."""
        return cls(recording, tuple(sorted(findings.suspects)), tuple(sorted(findings.mixing)))
