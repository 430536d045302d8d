"""Which node of a stage what happens belongs to.

What a backward runs belongs to the node in whose range of sequence numbers its autograd node's number lies.

Private torch API, used in this file only, tried on torch 2.13: ``torch._C._autograd._get_sequence_nr`` and
``torch._C._current_autograd_node``: torch has no public names for them.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator

import torch

_LEAF = 1 << 62
"""Autograd gives nodes that accumulate into leaves a number above all others."""


class Labels:
    """The node that runs, or in a backward the one whose operation's turn it is."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.names: list[str] = []
        self.running: list[str] = []
        self.repeating = False
        """A unit runs again: what goes between its nodes belongs to the one before."""
        self._last = ""

    def begin(self) -> None:
        """Begin a microbatch: what is done to its inputs belongs to no node, nor does the backward of that."""
        self.starts.append(torch._C._autograd._get_sequence_nr())
        self.names.append("")
        self.forget()

    def forget(self) -> None:
        """Begin a pass: what comes before its first node belongs to none."""
        self._last = ""

    @contextlib.contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Run a node."""
        self.starts.append(torch._C._autograd._get_sequence_nr())
        self.names.append(name)
        self.running.append(name)
        try:
            yield
        finally:
            self._last = self.running.pop()

    def current(self) -> str:
        """Return the node that something belongs to."""
        if self.running:
            return self.running[-1]
        node = None if self.repeating else torch._C._current_autograd_node()
        number = _LEAF if node is None else node._sequence_nr()
        if number < _LEAF:
            place = bisect.bisect_right(self.starts, number) - 1
            self._last = self.names[place] if place >= 0 else ""
        return self._last
