"""A schedule replayed: small steps in full, and three ways to count against each other."""

from __future__ import annotations

import pytest

from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.memory.allocator import device_changes, simulate_allocator
from autosplit.schedule.memory.pieces import NodeStep, Recompute, StageTrace, StageTraces
from autosplit.schedule.memory.replay import StaticBytes, replay
from autosplit.schedule.memory.updates import Updated, optimizer_changes
from tests.memory.extents import extent
from tests.memory.stages import model, traces
from tests.pairwise import in_turn

X, Y, DY, DX, WEIGHT, SCRATCH = range(6)

BACK = (NodeStep("", ((DX, -10), (Y, -20), (X, -10))),)
SMALL = StageTraces(
    never=StageTrace(
        forward=(NodeStep("", ((X, 10),)), NodeStep("mm", ((Y, 20), (SCRATCH, 5), (SCRATCH, -5)))),
        backward=(NodeStep("", ((DY, 20),)), NodeStep("mm", ((DX, 10), (WEIGHT, 100), (DY, -20))), *BACK),
        backward_later=(
            NodeStep("", ((DY, 20),)),
            NodeStep("mm", ((DX, 10), (WEIGHT, 100), (WEIGHT, -100), (DY, -20))),
            *BACK,
        ),
        gradients={WEIGHT: "weight"},
    )
)
STATIC = StaticBytes(parameters=(90, 10), optimizer=(200,))


def test_a_step_in_full() -> None:
    schedule = build("1f1b", stages=2, microbatches=2)
    (first, second) = replay(schedule, {0: SMALL, 1: SMALL}, [STATIC, STATIC])
    held = {"parameters": 100, "optimizer": 200}
    assert [(str(moment.action), moment.total_bytes) for moment in second.moments] == [
        ("1F0", 335),
        ("1B0", 460),
        ("1F1", 435),
        ("1B1", 560),
    ]
    assert first.left == held | {"gradients": 100}
    assert first.peak_bytes == 560
    assert first.peak.action == Action(0, "B", 1)
    assert [moment.bytes for moment in first.moments] == [
        held | {"activations": 30, "transient": 5},
        held | {"activations": 60, "transient": 5},
        held | {"activations": 60, "gradients": 100, "transient": 30},
        held | {"activations": 30, "gradients": 100, "transient": 130},
    ]


def test_the_optimizer_comes_last() -> None:
    finish = {0: optimizer_changes([Updated(25)], name="adam", foreach=True)}
    static = StaticBytes((100,), optimizer=(200,))
    (device,) = replay(build("gpipe", stages=1, microbatches=1), {0: SMALL}, [static], finish=finish)
    last = device.moments[-1]
    assert (last.action, last.total_bytes) == (None, 500)
    assert last.bytes == {"parameters": 100, "gradients": 100, "optimizer": 200, "transient": 100}
    assert device.left == {"parameters": 100, "gradients": 100, "optimizer": 200}


def test_casts_are_gone_when_the_optimizer_runs() -> None:
    own, finish = traces(4, cast=True), {0: ((0, 7), (0, -7))}
    (device,) = replay(build("gpipe", stages=1, microbatches=2), {0: own}, [StaticBytes()], finish=finish)
    casts = 2 * (2 * 4 * 16 + 16 + 4)
    assert [moment.bytes.get("casts", 0) for moment in device.moments] == [casts] * 4 + [0]
    assert device.moments[-1].bytes == {"gradients": 4 * (2 * 4 * 16 + 16 + 4 + 2 * 4), "transient": 7}


def test_values_of_the_whole_batch_stay_until_the_last_microbatch() -> None:
    static = StaticBytes(whole_batch=(1000,))
    (device,) = replay(build("gpipe", stages=1, microbatches=2), {0: SMALL}, [static])
    assert [moment.bytes.get("whole_batch") for moment in device.moments] == [1000] * 4
    assert device.left == {"gradients": 100}


def plain_count(schedule: Schedule, how: dict[int, StageTraces], *, device: int) -> int:
    """The most bytes that live on a device whose schedule has F and B only, straight from the traces."""
    live = most = 0
    last = schedule.microbatches - 1
    gradients: set[int] = set()
    for action in schedule.lanes[device]:
        own = how[action.stage]
        plain = own.recompute == "never" or (own.recompute == "except_last" and action.microbatch == last)
        trace = own.never if plain else own.recomputed
        assert trace is not None
        steps = trace.forward
        if action.kind == "B":
            steps = trace.backward_later if action.stage in gradients else trace.backward
            gradients.add(action.stage)
        for step in steps:
            for storage, count in step.changes:
                if action.microbatch == 0 or storage not in trace.kept:
                    live += count
                    most = max(most, live)
    return most


CASES = [
    (name, stages, microbatches, 1)
    for name in ("gpipe", "1f1b")
    for stages, microbatches in ((1, 1), (1, 3), (2, 1), (4, 2), (4, 9))
] + [
    ("interleaved", 4, 4, 2),
    ("interleaved", 6, 4, 3),
    ("looped_bfs", 4, 3, 2),
    ("zb_h1", 4, 6, 1),
    ("zb_h1", 4, 2, 1),
    ("zb_v", 8, 9, 2),
    ("forward", 4, 3, 1),
]


@in_turn(share=(0, 2), case=CASES, recompute=("never", "block", "always", "except_last"))
def test_replay_changes_and_a_plain_count_agree(case: tuple[str, int, int, int], recompute: Recompute) -> None:
    name, stages, microbatches, virtual = case
    schedule = build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual)
    how = model(stages, recompute, cast=stages != 4)
    static = [StaticBytes((50,), (7, 9), (500,) * (stages % 3))] * stages
    bare = replay(schedule, how, [StaticBytes()] * stages)
    full = replay(schedule, how, static)
    for device in range(len(schedule.lanes)):
        changes = list(device_changes(schedule, how, static, device=device))
        assert len({storage for storage, count in changes if count > 0}) == sum(count > 0 for _, count in changes)
        played = extent([NodeStep("", tuple(changes))])
        assert (played.left_bytes, played.peak_bytes) == (66 * virtual, full[device].peak_bytes)
        if schedule.kinds == {"F", "B"}:
            assert bare[device].peak_bytes == plain_count(schedule, how, device=device)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_the_allocator_plays_the_same_step(name: str) -> None:
    schedule = build(name, stages=4, microbatches=6)
    how = model(4)
    static = [StaticBytes(parameters=(3 << 20, 5 << 20))] * 4
    replayed = replay(schedule, how, static)
    for device in range(4):
        changes = device_changes(schedule, how, static, device=device, finishes=[(), ()])
        reserved = simulate_allocator(changes)
        assert reserved.requested_peak_bytes == replayed[device].peak_bytes
        assert reserved.reserved_peak_bytes == 22 << 20


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_what_stages_hold_adds_up_to_the_devices_peak(name: str) -> None:
    each = SCHEDULES[name].virtual_stages or 2
    schedule = build(name, stages=2 * each, microbatches=4, virtual_stages=each)
    own = model(schedule.stages, cast=True)
    static = [StaticBytes((100 + stage,), (stage,), whole_batch=(13,)) for stage in range(schedule.stages)]
    for lane, device in enumerate(replay(schedule, own, static)):
        assert set(device.held) == {stage for stage, place in enumerate(schedule.stage_lane) if place == lane}
        for kind in ("parameters", "optimizer", "gradients", "activations", "casts", "whole_batch"):
            total = sum(share.get(kind, 0) for share in device.held.values())
            assert total == device.peak.bytes.get(kind, 0), kind


def test_storages_without_bytes_are_no_changes() -> None:
    """A batch norm has one on the CPU: what comes and what goes cannot be told apart by the sign of nothing."""
    empty = StageTrace(
        (NodeStep("", ((X, 10), (Y, 0), (Y, 0))),), (NodeStep("", ((X, -10),)),), (NodeStep("", ((X, -10),)),)
    )
    one = StageTraces(never=empty)
    changes = device_changes(build("gpipe", stages=1, microbatches=2), {0: one}, [StaticBytes()], device=0)
    assert [count for _, count in changes] == [10, 10, -10, -10]


def test_steps_follow_each_other() -> None:
    """The first step makes Adam's state; the second finds it, and no gradients."""
    step = optimizer_changes([Updated(25)], name="adam", foreach=True)
    finishes = [((10, 100), (11, 100), *step), step]
    schedule = build("gpipe", stages=1, microbatches=2)
    changes = list(device_changes(schedule, {0: SMALL}, [StaticBytes((100,))], device=0, finishes=finishes))
    found = extent([NodeStep("", tuple(changes))])
    assert (found.left_bytes, found.peak_bytes) == (300, 300 + 30 + 100 + 130)
