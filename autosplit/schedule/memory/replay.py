"""A schedule's actions replayed over its stages' traces: what every device holds, when most, and for what.

Every action of a stage does one of a few things (`Piece`), so a replay adds up pieces: its cost is that of the actions,
not of the nodes in them. `allocator.device_changes` plays the same story change by change, for the allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.memory.pieces import Change, MemoryKind, Piece, StageTraces


@dataclass(frozen=True)
class StaticBytes:
    """Sizes of what a stage holds beside its microbatches.

    Attributes:
        parameters: parameters, buffers and copies of tied parameters: held all along.
        optimizer: master weights and state.
        whole_batch: values of the whole batch, such as random masks, and what runs on it: held from the stage's first
            action to its last.
    """

    parameters: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    whole_batch: tuple[int, ...] = ()


@dataclass(frozen=True)
class Moment:
    """The bytes of a device at the peak of one action; ``action`` is None in the optimizer's step."""

    action: Action | None
    bytes: Mapping[MemoryKind, int]

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class DeviceReplay:
    """One device's step.

    Attributes:
        moments: the highest moment of each action; the last entry is the optimizer's where there is one.
        left: what it holds when the step ends.
        held: what each of its stages held at the peak, without transient storages and messages on their way.
        guessed_bytes: the most scratch of one kernel that nobody measured.
    """

    moments: tuple[Moment, ...]
    left: Mapping[MemoryKind, int]
    held: Mapping[int, Mapping[MemoryKind, int]]
    guessed_bytes: int

    @property
    def peak(self) -> Moment:
        """The moment at which the most was held, the first of equals."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that was held."""
        return self.peak.total_bytes

    @property
    def running(self) -> int:
        """The stage whose action ran at the peak; in the optimizer's step the device's first."""
        return min(self.held) if self.peak.action is None else self.peak.action.stage

    def of(self, stage: int, *kinds: MemoryKind) -> int:
        """Return the bytes of some kinds that a stage held at the peak."""
        return sum(self.held[stage].get(kind, 0) for kind in kinds)


def replay(
    schedule: Schedule,
    traces: Mapping[int, StageTraces],
    static: Sequence[StaticBytes],
    *,
    finish: Mapping[int, Sequence[Change]] | None = None,
) -> tuple[DeviceReplay, ...]:
    """Return what each device holds over one step, which finds no gradients; ``traces`` and ``static`` are by stage.

    ``finish`` is, by device, what is allocated and freed at the end (`updates.handed_over`, `optimizer_changes`).

    Autocast's casts are made by a stage's first microbatch and shared by the others, until the device's last action
    ends (one autocast context around the step). A value between two stages of one device counts as the output of one
    and as the input of the other.
    """
    finish = finish or {}
    lanes = (ReplayedLane(schedule, traces, static, device) for device in range(len(schedule.lanes)))
    return tuple(_device(lane, finish.get(device, ())) for device, lane in enumerate(lanes))


class ReplayedLane:
    """One device's actions with their pieces."""

    def __init__(
        self,
        schedule: Schedule,
        traces: Mapping[int, StageTraces],
        static: Sequence[StaticBytes],
        device: int,
    ) -> None:
        self.actions = schedule.lanes[device]
        self.traces = traces
        self.static = {stage: static[stage] for stage in schedule.stages_on(device)}
        self.last_action = {action.stage: index for index, action in enumerate(self.actions)}
        self._first: dict[int, int] = {}
        for stage, _, microbatch in self.actions:
            self._first[stage] = min(microbatch, self._first.get(stage, microbatch))
        self._microbatches = schedule.microbatches
        self._differentiated = schedule.differentiated

    def piece(self, action: Action) -> Piece:
        """Return what an action does."""
        pieces = self.traces[action.stage].pieces(last=action.microbatch == self._microbatches - 1)
        first = action.microbatch == self._first[action.stage]
        return pieces.piece(action.kind, first=first, keeps=action.stage in self._differentiated)


def _device(lane: ReplayedLane, finish: Sequence[Change]) -> DeviceReplay:
    live: dict[int, Counter[MemoryKind]] = {
        stage: Counter({"parameters": sum(static.parameters), "optimizer": sum(static.optimizer)})
        for stage, static in lane.static.items()
    }
    moments: list[Moment] = []
    most, held = -1, {}
    for index, action in enumerate(lane.actions):
        alive, piece = live[action.stage], lane.piece(action)
        alive.setdefault("whole_batch", sum(lane.static[action.stage].whole_batch))
        moments.append(Moment(action, _sum(*live.values(), piece.at_peak)))
        if moments[-1].total_bytes > most:
            lasting: dict[MemoryKind, int] = {
                kind: count for kind, count in piece.at_peak.items() if kind != "transient"
            }
            most = moments[-1].total_bytes
            held = {stage: _sum(each, lasting if each is alive else {}) for stage, each in live.items()}
        alive.update(piece.left)
        if lane.last_action[action.stage] == index:
            del alive["whole_batch"]
    for alive in live.values():
        del alive["casts"]
    if finish or not moments:
        transient = max(accumulate(count for _, count in finish), default=0)
        moments.append(Moment(None, _sum(*live.values(), {"transient": transient})))
        if moments[-1].total_bytes > most:
            held = {stage: _sum(each) for stage, each in live.items()}
    guessed_bytes = max((lane.traces[stage].guessed_bytes for stage in live), default=0)
    return DeviceReplay(tuple(moments), _sum(*live.values()), held, guessed_bytes)


def _sum(*each: Mapping[MemoryKind, int]) -> dict[MemoryKind, int]:
    total: Counter[MemoryKind] = Counter()
    for counts in each:
        total.update(counts)
    return {kind: count for kind, count in total.items() if count}
