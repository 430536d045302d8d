"""The additive formulas against a plain count, change by change."""

from __future__ import annotations

import pytest

from autosplit.memory.pieces import Recompute
from autosplit.memory.play import device_changes
from autosplit.memory.replay import Setting, StaticBytes, replay
from autosplit.memory.stage import lane_bytes, lane_loads, trace_bytes
from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import build, in_flight
from tests.memory.layered import model, traces

RECOMPUTE: tuple[Recompute, ...] = ("never", "block", "always", "except_last")
PLAIN = [
    (name, stages, microbatches, 1)
    for name in ("gpipe", "1f1b")
    for stages, microbatches in ((1, 1), (1, 3), (2, 1), (4, 2), (4, 4), (4, 9))
]
LOOPED = [
    ("interleaved", 4, 4, 2),
    ("interleaved", 8, 8, 2),
    ("interleaved", 6, 4, 3),
    ("looped_bfs", 4, 3, 2),
]
SPLIT = [("zb_h1", 2, 4, 1), ("zb_h1", 4, 6, 1), ("zb_h1", 4, 2, 1), ("zb_v", 4, 5, 2), ("zb_v", 8, 9, 2)]


def plain_count(schedule: Schedule, how: dict[int, object], *, device: int, held: bool) -> int:
    """The most bytes that live on a device whose schedule has F and B only, straight from the traces."""
    live = most = 0
    last = schedule.microbatches - 1
    gradients: set[int] = set()
    for stage, lane in enumerate(schedule.stage_lane):
        if lane == device and held:
            live += sum(how[stage].gradients)
            gradients.add(stage)
    for action in schedule.lanes[device]:
        own = how[action.stage]
        plain = own.recompute == "never" or (own.recompute == "except_last" and action.microbatch == last)
        trace = own.never if plain else own.recomputed
        steps = trace.forward
        if action.kind == "B":
            steps = trace.backward_later if action.stage in gradients else trace.backward
            gradients.add(action.stage)
        for step in steps:
            for storage, count in step.changes:
                if action.microbatch == 0 or storage not in trace.kept:
                    live += count
                    most = max(most, live)
    return max(most, live)


def exact(schedule: Schedule, how: dict[int, object], *, device: int, held: bool) -> int:
    """The most bytes that live on a device, by the stream of changes."""
    static = [StaticBytes()] * schedule.stages
    live = most = 0
    for _, count in device_changes(schedule, how, static, device=device, settings=(Setting(gradients_held=held),)):
        live += count
        most = max(most, live)
    assert live == 0
    return most


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("scratch", [0, 5000])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), [*PLAIN, *LOOPED, *SPLIT])
def test_formula_replay_and_count_agree(
    name: str, stages: int, microbatches: int, virtual: int, recompute: Recompute, *, scratch: int, held: bool
) -> None:
    schedule = build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual)
    how = {
        index: traces(stage, recompute) for index, stage in enumerate(model(stages, cast=stages != 4, scratch=scratch))
    }
    replayed = replay(schedule, how, [StaticBytes()] * stages, setting=Setting(gradients_held=held)).peak_bytes
    for device in range(len(schedule.lanes)):
        counted = exact(schedule, how, device=device, held=held)
        if (name, stages, microbatches, virtual) not in SPLIT:
            assert counted == plain_count(schedule, how, device=device, held=held)
        loads = lane_loads(schedule, device=device, recompute=dict.fromkeys(range(stages), recompute))
        formula = lane_bytes(loads, how, static_bytes=0, gradients_held=held)
        assert (replayed[device], formula.peak_bytes) == (counted, counted)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("scratch", [0, 5000])
@pytest.mark.parametrize("recompute", RECOMPUTE[:3])
@pytest.mark.parametrize(("name", "stages", "microbatches", "virtual"), PLAIN)
def test_the_closed_form_of_gpipe_and_1f1b_is_exact(
    name: str, stages: int, microbatches: int, virtual: int, recompute: Recompute, *, scratch: int, held: bool
) -> None:
    schedule = build(name, stages=stages, microbatches=microbatches)
    how = {index: traces(stage, recompute) for index, stage in enumerate(model(stages, cast=True, scratch=scratch))}
    for stage in range(stages):
        count = in_flight(name, stage=stage, stages=stages, microbatches=microbatches)
        static = sum(how[stage].gradients) if held else 0
        closed = trace_bytes(
            how[stage], static_bytes=static, in_flight=count, microbatches=microbatches, gradients_held=held
        )
        assert closed.peak_bytes == exact(schedule, how, device=stage, held=held)
