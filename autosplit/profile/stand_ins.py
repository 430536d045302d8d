"""The backward of a first microbatch, told from that of a later one: one of them is run.

A later microbatch adds its gradients to sums that are there. Tensors stand in for these sums in the only microbatch
that runs, and each gradient is seen as it arrives at its sum. The first backward is the same without the adding:

    later    … makes g ─ adds it to the sum ─ frees g …
    first    … makes g ────────────────────────────── …    g is the gradient that stays

Whether autograd's engine adds in place depends on who holds the sum, which a first microbatch left as it made this one:
a view, which its base holds as well, is not added to. Where more gradients than one arrive at a leaf, or somebody has
one that might matter to what comes, nothing is told, and two microbatches must be run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from autosplit.memory.events import Change, Step
from autosplit.profile.engine_sums import is_dense, summed_in_place
from autosplit.profile.ledger import Ledger, Storage


@dataclass(frozen=True)
class Told:
    """Both backwards, and by leaf, by identity, the storage of the gradient that the first one leaves."""

    first: tuple[Step, ...]
    later: tuple[Step, ...]
    gradients: Mapping[int, int]


@dataclass
class _Sum:
    """What stands in for a leaf's sum, and the gradient that arrived, by storage.

    ``total`` is the sum that took its place. -1 stands for none.
    """

    leaf: int
    storage: int
    bytes: int
    large: bool
    gradient: int = -1
    total: int = -1


class StandIns:
    """Sums of gradients in the only microbatch that runs, and what comes of them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sums: dict[int, _Sum] = {}
        self._left_out: set[Change] = set()
        self._making: _Sum | None = None
        self._arrived: set[Change] = set()
        self._added_at = 0
        self._unsure = False

    def made(
        self, leaves: Iterable[torch.Tensor], arrivals: Counter[Any], *, large: Callable[[torch.Tensor], bool]
    ) -> dict[int, torch.Tensor]:
        """Return what stands in for the sums of the leaves that gradients arrive at, by their identity."""
        ends = {id(end.variable): count for end, count in arrivals.items() if hasattr(end, "variable")}
        self._ledger.sum_by(self._summed)
        found = {}
        for leaf in leaves:
            if id(leaf) in ends:
                self._unsure |= ends[id(leaf)] > 1
                found[id(leaf)] = stand_in = torch.empty(leaf.shape, dtype=leaf.dtype)
                storage = self.leave_out(stand_in)
                self._sums[storage.id] = _Sum(id(leaf), storage.id, storage.bytes, large(leaf))
        return found

    def leave_out(self, tensor: torch.Tensor) -> Storage:
        """Note that a tensor is there in later microbatches only; return its storage."""
        storage = self._ledger.storage(tensor)
        assert storage is not None, "only what has a storage is made for gradients"
        self._left_out |= {(storage.id, storage.bytes), (storage.id, -storage.bytes)}
        return storage

    def noted(self, change: Change) -> bool:
        """Return whether a change that happens is one of later microbatches only."""
        if self._making is not None and change[1] > 0:
            self._making.total, self._making = change[0], None
            self._left_out.add(change)
        if change in self._arrived:
            self._arrived.remove(change)
            self._unsure |= self._ledger.calls != self._added_at
        return change in self._left_out

    def _summed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, run: Any) -> torch.Tensor | None:
        """Return what `summed_in_place` returns; where a gradient arrives at its sum, as if a first one had made that.

        A gradient that arrived goes when the operation that made it is over. Until then nothing but sums may be made,
        and not of it.
        """
        storages = [self._ledger.storage(value) for value in args if isinstance(value, torch.Tensor)]
        if self._arrived:
            held = {storage.id for storage in storages if storage is not None}
            self._unsure |= any(storage in held for storage, _ in self._arrived)
            self._unsure |= self._ledger.calls != self._added_at + 1
        self._added_at = self._ledger.calls
        own = None if len(storages) != 2 or storages[0] is None else self._sums.get(storages[0].id)
        if own is None or torch.is_grad_enabled():
            return summed_in_place(func, args, kwargs, run=run)
        (total, gradient), arrived = args, storages[1]
        alike = total.shape == gradient.shape and total.dtype == gradient.dtype and is_dense(gradient)
        if arrived is None or arrived.bytes != own.bytes or not alike or own.gradient >= 0:
            self._unsure = True
            return None
        own.gradient = arrived.id
        self._arrived.add((arrived.id, -arrived.bytes))
        self._left_out.add((arrived.id, -arrived.bytes))
        if own.large and not gradient._is_view():
            run(torch.ops.aten.add_.Tensor, (total, gradient), {})
            return total
        self._making = own
        return None

    def told(self, later: Sequence[Step]) -> Told | None:
        """Return both backwards from the one that ran; None where it does not tell the other."""
        sums = self._sums.values()
        made_here = {(own.storage, own.bytes) for own in sums}
        every = [(step.node, change) for step in later for change in step.changes if change not in made_here]
        changes = {change for _, change in every}
        gone = all((own.gradient, -own.bytes) in changes and (own.gradient, own.bytes) in changes for own in sums)
        if self._unsure or self._arrived or not gone:
            return None
        first = [(node, change) for node, change in every if change not in self._left_out]
        names = {storage: storage + self._ledger.entered for storage, count in changes if count >= 0}
        names |= {own.storage: names[own.total] for own in sums if own.total >= 0}
        renamed = [(node, (names.get(storage, storage), count)) for node, (storage, count) in every]
        return Told(_steps(first), _steps(renamed), {own.leaf: own.gradient for own in sums})


def _steps(changes: Iterable[tuple[str, Change]]) -> tuple[Step, ...]:
    runs = groupby(changes, key=lambda pair: pair[0])
    return tuple(Step(node, tuple(change for _, change in own)) for node, own in runs)
