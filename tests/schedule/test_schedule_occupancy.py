"""Host issue time and memory over time: against closed forms, constraints checked one by one, and sampled instants."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.schedule.action import Action, Kind, Schedule
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.gpipe import gpipe
from autosplit.schedule.occupancy import Held, StageHolds
from autosplit.schedule.order import issue_order
from autosplit.schedule.simulate import Timeline, TransferTime, simulate

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def schedule_of(name: str, *, devices: int, microbatches: int) -> Schedule:
    each = SCHEDULES[name].virtual_stages or 2
    return build(name, stages=devices * each, microbatches=microbatches, virtual_stages=each)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, dict[Kind, list[float]], dict[Kind, list[float]], list[StageHolds]]:
    """A schedule with whole numbers of seconds and bytes."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    schedule = schedule_of(name, devices=draw(st.integers(1, 3)), microbatches=draw(st.integers(1, 5)))
    seconds = st.lists(st.integers(0, 4).map(float), min_size=schedule.stages, max_size=schedule.stages)
    times, issue = ({kind: draw(seconds) for kind in KINDS} for _ in range(2))
    sizes = st.integers(0, 5)
    transient = st.fixed_dictionaries({}, optional=dict.fromkeys(KINDS, sizes))
    holds = [draw(st.builds(StageHolds, sizes, sizes, sizes, transient)) for _ in range(schedule.stages)]
    return schedule, times, issue, holds


def simulated(
    schedule: Schedule,
    times: dict[Kind, list[float]],
    issue: dict[Kind, list[float]] | None = None,
    holds: list[StageHolds] | None = None,
) -> Timeline:
    return simulate(
        schedule,
        forward_s=times["F"],
        backward_s=times["B"],
        input_gradient_s=times["I"],
        weight_gradient_s=times["W"],
        issue_s=issue,
        holds=holds,
    )


@settings(max_examples=60)
@given(case=cases())
def test_an_action_starts_when_the_last_of_what_it_waits_for_is_there(
    case: tuple[Schedule, dict[Kind, list[float]], dict[Kind, list[float]], list[StageHolds]],
) -> None:
    schedule, times, issue, _ = case
    timeline = simulated(schedule, times, issue)
    span_of = {span.action: span for span in timeline.spans}
    issued_s = 0.0
    for action in issue_order(schedule):
        issued_s += issue[action.kind][action.stage]
        lane = schedule.lanes[schedule.stage_lane[action.stage]]
        place = lane.index(action)
        waits = [issued_s, *(span_of[need].end_s for need in schedule.needs(action))]
        waits += [span_of[lane[place - 1]].end_s] if place else []
        assert span_of[action].start_s == max(waits)
    assert timeline.host is not None
    assert timeline.host.busy_s == issued_s
    assert 0.0 <= timeline.host.critical_s <= min(issued_s, timeline.step_s)
    lanes_s = simulated(schedule, times).step_s
    assert max(lanes_s, issued_s) <= timeline.step_s <= timeline.host.critical_s + lanes_s


def test_a_slow_host_is_what_binds() -> None:
    issue: dict[Kind, list[float]] = {"F": [2.0] * 2, "B": [3.0] * 2}
    slow = simulate(gpipe(2, 4), forward_s=[0.1] * 2, backward_s=[0.1] * 2, issue_s=issue)
    assert slow.step_s == pytest.approx(2 * 4 * (2.0 + 3.0) + 0.1)
    assert slow.host_share == pytest.approx(40.0 / 40.1)
    assert slow.binds == "host"
    fast = simulate(gpipe(2, 4), forward_s=[10.0] * 2, backward_s=[10.0] * 2, issue_s=issue)
    assert fast.step_s == pytest.approx(2.0 + 20.0 * 5)  # the first action's issue, then GPipe's (M + P - 1)(F + B)
    assert fast.host is not None
    assert fast.host.critical_s == 2.0
    assert fast.host_share == pytest.approx(40.0 / 102.0)
    assert fast.binds == "lanes"


def test_without_issue_time_there_is_no_host() -> None:
    timeline = simulate(gpipe(2, 2), forward_s=[1.0] * 2, backward_s=[1.0] * 2)
    assert (timeline.host, timeline.host_share, timeline.binds, timeline.memory) == (None, 0.0, "lanes", ())
    none: dict[Kind, list[float]] = {"F": [0.0] * 2, "B": [0.0] * 2}
    issued = simulate(gpipe(2, 2), forward_s=[1.0] * 2, backward_s=[1.0] * 2, issue_s=none)
    assert (issued.spans, issued.step_s) == (timeline.spans, timeline.step_s)


def bytes_at(schedule: Schedule, timeline: Timeline, holds: list[StageHolds], *, lane: int, at_s: float) -> int:
    """Count what a device holds at an instant, microbatch by microbatch."""
    span_of = {span.action: span for span in timeline.spans}
    total = 0
    for stage in (stage for stage, place in enumerate(schedule.stage_lane) if place == lane):
        own = holds[stage]
        total += own.static_bytes
        for microbatch in range(schedule.microbatches):
            forward = span_of[Action(stage, "F", microbatch)]
            release = span_of[schedule.input_gradient(stage, microbatch)] if schedule.has_backward else forward
            total += own.resident_bytes * (forward.start_s < at_s < release.end_s)
            if (weights := span_of.get(Action(stage, "W", microbatch))) is not None:
                total += own.waiting_bytes * (release.end_s < at_s < weights.end_s)
        for span in timeline.spans:
            if span.action.stage == stage and span.start_s < at_s < span.end_s:
                total += own.transient_bytes.get(span.action.kind, 0)
    return total


@settings(max_examples=40)
@given(case=cases())
def test_what_a_device_holds_is_what_a_count_at_any_instant_gives(
    case: tuple[Schedule, dict[Kind, list[float]], dict[Kind, list[float]], list[StageHolds]],
) -> None:
    schedule, times, issue, holds = case
    times = {kind: [own + 1.0 for own in each] for kind, each in times.items()}
    timeline = simulated(schedule, times, issue, holds)
    instants = sorted({second for span in timeline.spans for second in (span.start_s, span.end_s)})
    middles = [(before + after) / 2 for before, after in itertools.pairwise(instants)]
    for lane, memory in enumerate(timeline.memory):
        counts = [bytes_at(schedule, timeline, holds, lane=lane, at_s=at_s) for at_s in middles]
        told = [next(h.bytes for h in reversed(memory.held) if h.from_s <= at_s) for at_s in middles]
        assert told == counts
        assert memory.peak_bytes == max(counts, default=0)
        if memory.peak_action is not None:
            assert next(h for h in memory.held if h.from_s == memory.peak_s).bytes == memory.peak_bytes


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [2, 8])
def test_microbatches_held_are_the_published_numbers(devices: int, microbatches: int) -> None:
    """Of a unit per microbatch; `formulas.md`: GPipe M, 1F1B min(M, P - r), ZB-H1 P, of which W's are half here."""

    def peaks(name: str, *, waiting: int = 1) -> list[int]:
        schedule = schedule_of(name, devices=devices, microbatches=microbatches)
        times: dict[Kind, list[float]] = {kind: [1.0] * schedule.stages for kind in KINDS}
        holds = [StageHolds(resident_bytes=2, waiting_bytes=waiting) for _ in range(schedule.stages)]
        return [memory.peak_bytes for memory in simulated(schedule, times, None, holds).memory]

    depths = [min(microbatches, devices - rank) for rank in range(devices)]
    assert peaks("gpipe") == [2 * microbatches] * devices
    assert peaks("1f1b") == [2 * depth for depth in depths]
    assert peaks("forward") == [2] * devices
    assert peaks("zb_h1", waiting=2) == [2 * min(microbatches, devices)] * devices
    if microbatches % devices == 0:
        loops = [min(2 * microbatches, 2 * (devices - rank - 1) + devices + 1) for rank in range(devices)]
        assert peaks("interleaved") == [2 * count for count in loops]


def test_a_grid_by_hand() -> None:
    schedule = build("zb_h1", stages=1, microbatches=2)
    holds = [StageHolds(static_bytes=10, resident_bytes=4, waiting_bytes=1, transient_bytes={"I": 2})]
    timeline = simulate(schedule, forward_s=[1.0], input_gradient_s=[1.0], weight_gradient_s=[1.0], holds=holds)
    (memory,) = timeline.memory
    assert memory.held == tuple(
        Held(float(at_s), total) for at_s, total in ((0, 14), (1, 16), (2, 11), (3, 14), (4, 16), (5, 11), (6, 10))
    )
    assert (memory.peak_bytes, memory.peak_s, str(memory.peak_action)) == (16, 1.0, "0I0")


def test_a_transfer_keeps_what_it_delays() -> None:
    late = TransferTime(0, 1, forward_s=0.0, backward_s=5.0)
    holds = [StageHolds(resident_bytes=1)] * 2
    timeline = simulate(gpipe(2, 1), forward_s=[1.0] * 2, backward_s=[1.0] * 2, transfers=(late,), holds=holds)
    assert timeline.memory[0].held[-1] == Held(9.0, 0)
    assert timeline.memory[1].held[-1] == Held(3.0, 0)
