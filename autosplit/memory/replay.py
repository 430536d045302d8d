"""A schedule's actions replayed over its stages' traces: what every device holds, when most, and for what.

Every action of a stage does one of a few things (`Piece`), so a replay adds up pieces: its cost is that of the actions,
not of the nodes in them. `allocator.device_changes` plays the same story change by change, for the allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autosplit.memory.events import Step
from autosplit.memory.pieces import MemoryKind, Piece, StageTraces
from autosplit.schedule.action import Action, Schedule


@dataclass(frozen=True)
class StaticBytes:
    """Sizes of what a stage holds beside its microbatches.

    Attributes:
        parameters: parameters, buffers and copies of tied parameters: held all along.
        optimizer: master weights, and state that is there before the step.
        whole_batch: values of the whole batch, such as random masks: held from the stage's first action to its last.
    """

    parameters: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    whole_batch: tuple[int, ...] = ()


@dataclass(frozen=True)
class Moment:
    """When a device held the most; ``action`` is None in the optimizer's step, ``node`` "" between nodes."""

    action: Action | None
    node: str
    bytes: Mapping[MemoryKind, int]

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class ActionBytes:
    """One action of a device: its highest moment, and what lives after it."""

    peak: Moment
    left: Mapping[MemoryKind, int]


@dataclass(frozen=True)
class DeviceReplay:
    """One device's step, action by action; the last entry is the optimizer's where there is one.

    ``held`` is what each of its stages held at the peak, but for what was transient or on its way.
    """

    actions: tuple[ActionBytes, ...]
    held: Mapping[int, Mapping[MemoryKind, int]]

    @property
    def peak(self) -> Moment:
        """The moment at which the most was held, the first of equals."""
        return max((entry.peak for entry in self.actions), key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that was held."""
        return self.peak.total_bytes


@dataclass(frozen=True)
class Replayed:
    """A step, device by device."""

    devices: tuple[DeviceReplay, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each device held."""
        return tuple(device.peak_bytes for device in self.devices)


def replay(
    schedule: Schedule,
    traces: Mapping[int, StageTraces],
    static: Sequence[StaticBytes],
    *,
    finish: Mapping[int, Sequence[Step]] | None = None,
) -> Replayed:
    """Return what each device holds over one step, which finds no gradients; ``traces`` and ``static`` are by stage.

    ``finish`` is, by device, what the optimizer does at the end (`state.optimizer_steps`).

    Autocast's casts are made by a stage's first microbatch and shared by the others, until the device's last action
    ends (one autocast context around the step). A value between two stages of one device counts as the output of one
    and as the input of the other. Raises ValueError where a stage has no trace.
    """
    finish = finish or {}
    return Replayed(
        tuple(
            _device(Lane(schedule, traces, static, device), finish.get(device, ()))
            for device in range(len(schedule.lanes))
        )
    )


class Lane:
    """One device's actions with their pieces."""

    def __init__(
        self,
        schedule: Schedule,
        traces: Mapping[int, StageTraces],
        static: Sequence[StaticBytes],
        device: int,
    ) -> None:
        self.actions = schedule.lanes[device]
        self.stages = schedule.stages_on(device)
        missing = [stage for stage in self.stages if stage not in traces or stage >= len(static)]
        if missing:
            raise ValueError(f"stage {missing[0]} has no trace or no static bytes; give both for every stage")
        self.traces = {stage: traces[stage] for stage in self.stages}
        self.static = {stage: static[stage] for stage in self.stages}
        self.last_action = {action.stage: index for index, action in enumerate(self.actions)}
        self._microbatches = schedule.microbatches
        self._keeps = schedule.has_backward

    def piece(self, action: Action) -> Piece:
        """Return what an action does."""
        traces = self.traces[action.stage]
        variant = traces.variant(last=action.microbatch == self._microbatches - 1)
        return traces.pieces[variant].piece(action.kind, first=action.microbatch == 0, keeps=self._keeps)


def _device(lane: Lane, finish: Sequence[Step]) -> DeviceReplay:
    live: Counter[MemoryKind] = Counter()
    for static in lane.static.values():
        live["parameters"] += sum(static.parameters)
        live["optimizer"] += sum(static.optimizer)
    shares = _Shares(lane)
    started: set[int] = set()
    entries = []
    for index, action in enumerate(lane.actions):
        if action.stage not in started:
            started.add(action.stage)
            live["whole_batch"] += sum(lane.static[action.stage].whole_batch)
            shares.own[action.stage]["whole_batch"] = sum(lane.static[action.stage].whole_batch)
        piece = lane.piece(action)
        peak = Moment(action, piece.peak_node, _sum(live, piece.at_peak))
        shares.see(peak, action.stage, piece.at_peak)
        live.update(piece.left)
        shares.own[action.stage].update(piece.left)
        if lane.last_action[action.stage] == index:
            live["whole_batch"] -= shares.own[action.stage].pop("whole_batch")
        entries.append(ActionBytes(peak, _sum(live, {})))
    live["casts"] = 0
    if finish or not entries:
        entries.append(_finish(finish, live))
        shares.end(entries[-1].peak)
    return DeviceReplay(tuple(entries), shares.held)


class _Shares:
    """What each stage of a device holds, kept for the highest moment so far."""

    def __init__(self, lane: Lane) -> None:
        self.own: dict[int, Counter[MemoryKind]] = {stage: Counter() for stage in lane.stages}
        for stage, static in lane.static.items():
            self.own[stage]["parameters"] = sum(static.parameters)
            self.own[stage]["optimizer"] = sum(static.optimizer)
        self.held: dict[int, Mapping[MemoryKind, int]] = {}
        self._most = -1

    def see(self, peak: Moment, stage: int | None, more: Mapping[MemoryKind, int]) -> None:
        """Take note of an action's highest moment; ``stage`` holds ``more`` then."""
        if peak.total_bytes > self._most:
            self._most = peak.total_bytes
            lasting: dict[MemoryKind, int] = {kind: count for kind, count in more.items() if kind != "transient"}
            self.held = {own: _sum(live, lasting) if own == stage else _sum(live, {}) for own, live in self.own.items()}

    def end(self, peak: Moment) -> None:
        """Take note of the optimizer's step, before which casts end."""
        for live in self.own.values():
            del live["casts"]
        self.see(peak, None, {})


def _finish(finish: Sequence[Step], live: Counter[MemoryKind]) -> ActionBytes:
    total = peak = 0
    node = ""
    for step in finish:
        for _, count in step.changes:
            total += count
            if total > peak:
                peak, node = total, step.node
    state = Counter(live)
    state["optimizer"] += total
    return ActionBytes(Moment(None, node, _sum(state, {"transient": peak - total})), _sum(state, {}))


def _sum(live: Mapping[MemoryKind, int], more: Mapping[MemoryKind, int]) -> dict[MemoryKind, int]:
    kinds = dict.fromkeys((*live, *more))
    return {kind: total for kind in kinds if (total := live.get(kind, 0) + more.get(kind, 0))}
