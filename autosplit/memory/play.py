"""A device's step change by change, each allocation under a number of its own: what an allocator is asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from autosplit.memory.events import Change
from autosplit.memory.pieces import StageTraces
from autosplit.memory.replay import Lane, Setting, StaticBytes
from autosplit.schedule.action import Action, Schedule


def device_changes(
    schedule: Schedule,
    traces: Mapping[int, StageTraces],
    static: Sequence[StaticBytes],
    *,
    device: int,
    settings: Sequence[Setting] = (Setting(),),
) -> Iterator[Change]:
    """Yield every change of one device, in order, each allocation under a number of its own: a step per setting.

    Begins with what is held before the steps. A step's gradients are freed after it (``zero_grad``), unless the next
    step is to find them.
    """
    player = _Player()
    lanes = [Lane(schedule, traces, static, setting, device) for setting in settings]
    yield from player.begin(lanes[0])
    for lane, following in zip(lanes, (*lanes[1:], None), strict=True):
        yield from player.step(lane)
        if following is None or not following.setting.gradients_held:
            yield from player.zero_gradients()


class _Player:
    """Plays a device's steps change by change."""

    def __init__(self) -> None:
        self._next = 0
        self._live: dict[tuple[int, int], dict[int, Change]] = {}
        """By stage and microbatch, then by storage."""
        self._gradients: list[Change] = []
        self._casts: list[Change] = []
        self._posted: deque[int] = deque()
        self._sent: deque[tuple[Change, ...]] = deque()

    def begin(self, lane: Lane) -> Iterator[Change]:
        for static in lane.static.values():
            yield from map(self._new, (*static.parameters, *static.optimizer))
        self._gradients = [self._new(count) for _, count in lane.held_gradients()]
        yield from self._gradients

    def step(self, lane: Lane) -> Iterator[Change]:
        receivers = iter([index for index, action in enumerate(lane.actions) if lane.receives(action)])
        whole: dict[int, list[Change]] = {}
        for index, action in enumerate(lane.actions):
            if action.stage not in whole:
                whole[action.stage] = [self._new(count) for count in lane.static[action.stage].whole_batch]
                yield from whole[action.stage]
            yield from self._post(lane, index, receivers)
            yield from self._act(lane, action)
            if lane.last_action[action.stage] == index:
                yield from map(_freed, whole[action.stage])
        for changes in (*self._sent, self._casts):
            yield from map(_freed, changes)
        self._sent.clear()
        self._casts.clear()
        state: dict[int, Change] = {}
        for storage, count in (change for step in lane.finish for change in step.changes):
            if count > 0:
                state[storage] = self._new(count)
            yield state[storage] if count > 0 else _freed(state.pop(storage))

    def zero_gradients(self) -> Iterator[Change]:
        yield from map(_freed, self._gradients)
        self._gradients.clear()

    def _post(self, lane: Lane, index: int, receivers: Iterator[int]) -> Iterator[Change]:
        """Allocate what the next receiving actions will be sent, ``posted_receives`` of them."""
        while self._posted and self._posted[0] <= index:
            self._posted.popleft()
        while len(self._posted) < lane.setting.posted_receives and (at := next(receivers, None)) is not None:
            if at > index:
                action = lane.actions[at]
                own = self._live.setdefault((action.stage, action.microbatch), {})
                posted = {storage: self._new(count) for storage, count in lane.receives(action)}
                own |= posted
                yield from posted.values()
                self._posted.append(at)

    def _act(self, lane: Lane, action: Action) -> list[Change]:
        piece = lane.piece(action)
        own = self._live.setdefault((action.stage, action.microbatch), {})
        here = {storage for storage, _ in piece.arriving if storage in own}
        held = {storage for storage, _ in lane.sends(action)} if lane.setting.pending_sends else set()
        played: list[Change] = []
        sent: list[Change] = []
        for storage, count, kind in piece.played:
            if count > 0:
                if storage in here:
                    here.remove(storage)
                    continue
                change = self._new(count)
                played.append(change)
                if kind == "gradients":
                    self._gradients.append(change)
                elif kind == "casts":
                    self._casts.append(change)
                else:
                    own[storage] = change
            elif kind == "gradients":
                played.append(_freed(self._exchange(-count)))
            elif storage in held:
                sent.append(own.pop(storage))
            else:
                number, count = own.pop(storage)
                played.append((number, -count))
        self._sent.append(tuple(sent))
        if len(self._sent) > lane.setting.pending_sends:
            played.extend(map(_freed, self._sent.popleft()))
        return played

    def _exchange(self, count: int) -> Change:
        """Return the oldest gradient of a size, which a new sum replaces."""
        at = next(index for index, change in enumerate(self._gradients) if change[1] == count)
        return self._gradients.pop(at)

    def _new(self, count: int) -> Change:
        self._next += 1
        return self._next - 1, count


def _freed(change: Change) -> Change:
    return change[0], -change[1]
