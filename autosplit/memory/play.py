"""A device's steps change by change, each allocation under a number of its own: what an allocator is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autosplit.memory.events import Change, Step
from autosplit.memory.pieces import StageTraces
from autosplit.memory.replay import Lane, StaticBytes
from autosplit.schedule.action import Action, Schedule


def device_changes(
    schedule: Schedule,
    traces: Mapping[int, StageTraces],
    static: Sequence[StaticBytes],
    *,
    device: int,
    finishes: Sequence[Sequence[Step]] = ((),),
) -> Iterator[Change]:
    """Yield every change of one device, in order, each allocation under a number of its own.

    ``finishes`` has what the optimizer does at the end of each step, one entry per step. Begins with what is held
    before the steps. A step's gradients are freed after it (``zero_grad``).
    """
    lane = Lane(schedule, traces, static, device)
    player = _Player()
    for own in lane.static.values():
        yield from map(player.new, (*own.parameters, *own.optimizer))
    for finish in finishes:
        yield from player.step(lane, finish)


class _Player:
    """Plays a device's steps change by change."""

    def __init__(self) -> None:
        self._next = 0
        self._live: dict[tuple[int, int], dict[int, Change]] = {}
        """By stage and microbatch, then by storage."""
        self._gradients: list[Change] = []
        self._casts: list[Change] = []

    def new(self, count: int) -> Change:
        """Return an allocation under a new number."""
        self._next += 1
        return self._next - 1, count

    def step(self, lane: Lane, finish: Sequence[Step]) -> Iterator[Change]:
        """Yield the changes of one step."""
        whole_batch: dict[int, list[Change]] = {}
        for index, action in enumerate(lane.actions):
            if action.stage not in whole_batch:
                whole_batch[action.stage] = [self.new(count) for count in lane.static[action.stage].whole_batch]
                yield from whole_batch[action.stage]
            yield from self._act(lane, action)
            if lane.last_action[action.stage] == index:
                yield from map(_freed, whole_batch[action.stage])
        yield from map(_freed, self._casts)
        self._casts.clear()
        state: dict[int, Change] = {}
        for storage, count in (change for step in finish for change in step.changes):
            if count > 0:
                state[storage] = self.new(count)
            yield state[storage] if count > 0 else _freed(state.pop(storage))
        yield from map(_freed, self._gradients)
        self._gradients.clear()

    def _act(self, lane: Lane, action: Action) -> Iterator[Change]:
        own = self._live.setdefault((action.stage, action.microbatch), {})
        for storage, count, kind in lane.piece(action).played:
            if count > 0:
                change = self.new(count)
                if kind == "gradients":
                    self._gradients.append(change)
                elif kind == "casts":
                    self._casts.append(change)
                else:
                    own[storage] = change
                yield change
            elif kind == "gradients":
                yield _freed(self._replaced(-count))
            else:
                yield _freed(own.pop(storage))

    def _replaced(self, count: int) -> Change:
        """Return the oldest gradient of a size, which a new sum replaces."""
        at = next(index for index, change in enumerate(self._gradients) if change[1] == count)
        return self._gradients.pop(at)


def _freed(change: Change) -> Change:
    return change[0], -change[1]
