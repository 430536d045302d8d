"""Boundaries moved while the simulated step gets shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from itertools import combinations
from operator import itemgetter

import numpy as np

from autosplit.partition.clock import Clock
from autosplit.partition.fast_simulate import Floats, Ints
from autosplit.partition.step_pool import StagePool

_ALONE = 12
_TOGETHER = 3
_REACH = 256
"""How many ideals a boundary alone may move to, how many each of a pair may, and how far in order of weight."""
_CELLS, _TURNS = 200_000_000, 40
"""Actions that are simulated from one pool, chains times schedule, and how many turns these must last for."""
_START = 300
"""What starting a simulation takes, in chains that it could have simulated."""


@dataclass(frozen=True)
class Scored:
    """A chain and its step."""

    step_s: float
    chain: tuple[int, ...]


class LocalSearch:
    """The shortest steps near given chains of a pool."""

    def __init__(self, pool: StagePool, *, clock: Clock) -> None:
        self.pool, self.clock = pool, clock
        self.known: dict[tuple[int, ...], float] = {}
        self.left = _CELLS // max(pool.model.simulator.count, 1)
        self.at_once = max(16, self.left // _TURNS)
        self.turn = 0

    def score(self, chains: Iterable[tuple[int, ...]]) -> list[Scored]:
        """Return the chains that fit with their steps, the shortest first."""
        wanted = list(dict.fromkeys(chains))
        fresh = [chain for chain in wanted if chain not in self.known]
        if fresh:
            self.left -= max(len(fresh), _START)
            steps = self.pool.steps(np.array(fresh, dtype=np.int64))
            self.known |= zip(fresh, steps.tolist(), strict=True)
        found = [Scored(self.known[chain], chain) for chain in wanted if np.isfinite(self.known[chain])]
        return sorted(found, key=lambda each: (each.step_s, each.chain))

    def best(self, count: int) -> list[Scored]:
        """Return the shortest steps met so far."""
        found = nsmallest(count, self.known.items(), key=itemgetter(1))
        return [Scored(step_s, chain) for chain, step_s in found if np.isfinite(step_s)]

    def descend(self, start: Scored, *, rounds: int, double: bool) -> Scored:
        """Move one boundary or a run of them, or ``double`` two, to what shortens the step most, until nothing does."""
        best = start
        for _ in range(rounds):
            if self.clock.over or self.left < 0:
                break
            better = self._better(best, self._single) or (self._better(best, self._double) if double else None)
            if better is None:
                break
            best = better
        return best

    def _better(self, best: Scored, moves: Callable[[Ints], Ints]) -> Scored | None:
        """Return the best of the moves, or of every so many where they are too many, if it is better."""
        moved = moves(np.array(best.chain))
        step = -(-len(moved) // self.at_once) or 1
        found = self.score(map(tuple, moved[self.turn % step :: step].tolist()))
        self.turn += 1
        return found[0] if found and found[0].step_s < best.step_s * (1 - 1e-12) else None

    def _single(self, chain: Ints) -> Ints:
        """Return the chain with one boundary elsewhere, or with a run of boundaries moved alike by a step or two."""
        stages = len(chain) - 1
        moved = []
        nearest = [self._near(int(position), _ALONE) for position in chain]
        for boundary in range(1, stages):
            others = self._near_between(chain, boundary)
            block = np.repeat(chain[None], len(others), axis=0)
            block[:, boundary] = others
            moved.append(block)
        for first, last in combinations(range(1, stages + 1), 2):
            for side in (0, 1):
                for far in (0, 1):
                    own = [nearest[boundary][side] for boundary in range(first, last)]
                    if last - first > 1 and all(len(each) > far for each in own):
                        shifted = chain.copy()
                        shifted[first:last] = [each[far] for each in own]
                        moved.append(shifted[None])
        return np.concatenate(moved) if moved else np.zeros((0, stages + 1), dtype=np.int64)

    def _double(self, chain: Ints) -> Ints:
        """Return the chain with two boundaries elsewhere."""
        stages = len(chain) - 1
        near = [
            np.concatenate([side[:_TOGETHER] for side in self._near(int(position), _TOGETHER)]) for position in chain
        ]
        moved = []
        for first, second in combinations(range(1, stages), 2):
            left, right = np.meshgrid(near[first], near[second], indexing="ij")
            block = np.repeat(chain[None], left.size, axis=0)
            block[:, first], block[:, second] = left.ravel(), right.ravel()
            moved.append(block)
        return np.concatenate(moved) if moved else np.zeros((0, stages + 1), dtype=np.int64)

    def _near(self, position: int, count: int) -> tuple[Ints, Ints]:
        """Return the nearest subsets and supersets of an ideal by weight, nearest first."""
        table = self.pool.table
        low, high = max(1, position - _REACH), min(self.pool.size - 1, position + 1 + _REACH)
        larger = table.supersets(position, start=position + 1, stop=high) if position + 1 < high else _NONE
        below = self.pool.member[low:position]
        smaller = low + np.flatnonzero(~(below & ~self.pool.member[position]).any(axis=1)) if low < position else _NONE
        return smaller[::-1][:count], larger[:count]

    def _near_between(self, chain: Ints, boundary: int) -> Ints:
        """Return the nearest ideals by weight that the boundary could move to while its neighbours stay."""
        pool, position = self.pool, int(chain[boundary])
        low = max(int(chain[boundary - 1]) + (not pool.empty), position - _REACH)
        high = min(int(chain[boundary + 1]) + pool.empty, position + 1 + _REACH)
        larger = pool.table.supersets(int(chain[boundary - 1]), start=low, stop=high)
        inside = ~(pool.member[larger] & ~pool.member[chain[boundary + 1]]).any(axis=1)
        others = larger[inside & (larger != position)]
        distance: Floats = np.abs(pool.table.weight[others] - pool.table.weight[position]).astype(np.float64)
        found: Ints = others[np.argsort(distance, kind="stable")][: 2 * _ALONE]
        return found


_NONE = np.zeros(0, dtype=np.int64)
