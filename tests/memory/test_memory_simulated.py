"""The simulator's memory over time and the replay of traces tell the same peaks, and stages' shares add up."""

from __future__ import annotations

import pytest

from autosplit.memory.pieces import StageTraces
from autosplit.memory.replay import Setting, StaticBytes, replay
from autosplit.schedule.action import Kind
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.occupancy import StageHolds
from autosplit.schedule.simulate import simulate
from tests.memory.layered import model, traces


def holds_of(own: StageTraces, static: StaticBytes, *, split: bool) -> StageHolds:
    """Return a stage's sizes where gradients are there from the start and all microbatches are alike."""
    kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
    pieces = {kind: own.pieces["never"].piece(kind, first=False, fresh=False) for kind in kinds}
    resident = pieces["F"].left["activations"]
    more = {kind: piece.peak_bytes for kind, piece in pieces.items()}
    more["F"] -= resident
    return StageHolds(
        static_bytes=sum(static.parameters) + sum(static.optimizer) + sum(own.gradients),
        resident_bytes=resident,
        waiting_bytes=resident + pieces["I"].left.get("activations", 0) if split else 0,
        transient_bytes=more,
    )


@pytest.mark.parametrize("microbatches", [1, 3, 6])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward"])
def test_simulated_peaks_are_the_replayed_ones(name: str, devices: int, microbatches: int) -> None:
    each = SCHEDULES[name].virtual_stages or 2
    schedule = build(name, stages=devices * each, microbatches=microbatches, virtual_stages=each)
    own = [traces(stage) for stage in model(schedule.stages, scratch=7)]
    static = [StaticBytes(parameters=(100 + stage,), optimizer=(stage,)) for stage in range(schedule.stages)]
    found = replay(schedule, dict(enumerate(own)), static, setting=Setting(gradients_held=True))
    ones = [1.0] * schedule.stages
    timeline = simulate(
        schedule,
        forward_s=ones,
        backward_s=ones,
        input_gradient_s=ones,
        weight_gradient_s=ones,
        holds=[holds_of(*pair, split=name.startswith("zb")) for pair in zip(own, static, strict=True)],
    )
    assert tuple(memory.peak_bytes for memory in timeline.memory) == found.peak_bytes
    assert [memory.peak_action for memory in timeline.memory] == [device.peak.action for device in found.devices]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_what_stages_hold_adds_up_to_the_devices_peak(name: str, *, held: bool) -> None:
    each = SCHEDULES[name].virtual_stages or 2
    schedule = build(name, stages=2 * each, microbatches=4, virtual_stages=each)
    own = dict(enumerate(traces(stage) for stage in model(schedule.stages, cast=True, scratch=7)))
    static = [StaticBytes((100 + stage,), (stage,), whole_batch=(13,)) for stage in range(schedule.stages)]
    for lane, device in enumerate(replay(schedule, own, static, setting=Setting(gradients_held=held)).devices):
        assert set(device.held) == {stage for stage, place in enumerate(schedule.stage_lane) if place == lane}
        for kind in ("parameters", "optimizer", "gradients", "activations", "casts", "whole_batch"):
            total = sum(share.get(kind, 0) for share in device.held.values())
            assert total == device.peak.bytes.get(kind, 0), kind
