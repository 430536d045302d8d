"""What stages pay for the tensors that they cut, read for many stages at once.

A tensor is cut by a stage that holds some of its pins and not all. Let the stage begin at ideal ``I`` and end at ``J``.
What counts is only which tensors lie across ``I`` (pins on both sides): all others pay as if the stage were the whole
of ``J``. One that lies across ``I`` is paid for when any more of its pins are in ``J``, so to what ``J`` pays it

    adds its cost         when J holds all its pins     (J does not pay, the stage does)
    takes away its cost   when J holds no more than I   (J pays, the stage does not)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autosplit.partition.graph import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_DENSE = 4
"""Where a slice is at most so many times as long as the columns wanted of it, it is read whole."""


class Cuts:
    """The tensors of a pool of ideals; ``columns[group]`` tells for each ideal whether it contains the group."""

    def __init__(self, columns: NDArray[np.bool_], tensors: Sequence[Tensor]) -> None:
        costs: dict[tuple[int, ...], float] = {}
        for tensor in tensors:
            pins = tuple(sorted(tensor.pins))
            costs[pins] = costs.get(pins, 0.0) + tensor.cost_s
        self.cost: Floats = np.array(list(costs.values()), dtype=np.float64)
        most = max(map(len, costs), default=0)
        kind = np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.uint32
        self.pins = np.array([len(pins) for pins in costs], dtype=kind)
        self.inside = np.zeros((len(costs), columns.shape[1]), dtype=kind)
        self.paid: Floats = np.zeros(columns.shape[1])
        across = []
        for row, (pins, cost) in enumerate(costs.items()):
            inside = self.inside[row]
            for pin in pins:
                inside += columns[pin]
            ideals = np.flatnonzero((inside != 0) & (inside != len(pins)))
            self.paid[ideals] += cost
            across.append(ideals)
        self._index_rows(across)

    def _index_rows(self, across: Sequence[Ints]) -> None:
        """Keep for each ideal the rows that lie across it, one after the other."""
        counts = [len(ideals) for ideals in across]
        ideals = np.concatenate(across) if across else np.zeros(0, dtype=np.int64)
        rows = np.repeat(np.arange(len(across)), counts)
        self.rows = rows[np.argsort(ideals, kind="stable")]
        self.first = np.concatenate(([0], np.cumsum(np.bincount(ideals, minlength=self.inside.shape[1])))).tolist()

    def stage_cost(self, ideal: int, larger: Ints) -> Floats:
        """Return what the stages ``larger`` (ascending) minus ``ideal`` pay."""
        paid = self.paid[larger]
        rows = self.rows[self.first[ideal] : self.first[ideal + 1]]
        if not len(rows) or not len(larger):
            return paid
        start, stop = int(larger[0]), int(larger[-1]) + 1
        whole = stop - start <= _DENSE * len(larger)
        block = self.inside[rows, start:stop] if whole else self.inside[rows[:, None], larger]
        adds = (block == self.pins[rows, None]).view(np.int8) - (block == self.inside[rows, ideal, None]).view(np.int8)
        change: Floats = self.cost[rows] @ adds
        result: Floats = paid + (change[larger - start] if whole else change)
        return result
