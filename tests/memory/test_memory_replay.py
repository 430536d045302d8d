"""A schedule replayed: small steps in full, and the two ways to replay against each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.memory.allocator import AllocatorOptions, simulate_allocator
from autosplit.memory.events import StageTrace, Step
from autosplit.memory.pieces import Recompute, StageTraces
from autosplit.memory.play import device_changes
from autosplit.memory.replay import Setting, StaticBytes, replay
from autosplit.memory.stage import Part, lane_bytes, lane_loads, stage_bytes, trace_bytes
from autosplit.memory.state import Optimizer, optimizer_steps, parameter_bytes
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import build, in_flight
from tests.memory.layered import Layer, Stage, model, traces

X, Y, DY, DX, WEIGHT, SCRATCH = range(6)

BACK = (Step("", ((DX, -10), (Y, -20), (X, -10))),)
SMALL = StageTraces(
    never=StageTrace(
        forward=(Step("", ((X, 10),)), Step("mm", ((Y, 20), (SCRATCH, 5), (SCRATCH, -5)))),
        backward=(Step("", ((DY, 20),)), Step("mm", ((DX, 10), (WEIGHT, 100), (DY, -20))), *BACK),
        backward_later=(
            Step("", ((DY, 20),)),
            Step("mm", ((DX, 10), (WEIGHT, 100), (WEIGHT, -100), (DY, -20))),
            *BACK,
        ),
        gradients={WEIGHT: "weight"},
    )
)
STATIC = StaticBytes(parameters=(90, 10), optimizer=(200,))


def test_a_step_in_full() -> None:
    schedule = build("1f1b", stages=2, microbatches=2)
    (first, second) = replay(schedule, {0: SMALL, 1: SMALL}, [STATIC, STATIC]).devices
    held = {"parameters": 100, "optimizer": 200}
    assert [(str(entry.peak.action), entry.peak.total_bytes) for entry in second.actions] == [
        ("1F0", 335),
        ("1B0", 460),
        ("1F1", 435),
        ("1B1", 560),
    ]
    assert [entry.left for entry in first.actions] == [
        held | {"activations": 30},
        held | {"activations": 60},
        held | {"activations": 30, "gradients": 100},
        held | {"gradients": 100},
    ]
    assert first.peak_bytes == 560
    assert (first.peak.action, first.peak.node) == (Action(0, "B", 1), "mm")
    assert first.peak.bytes == held | {"gradients": 100, "activations": 30, "transient": 130}
    assert first.actions[1].peak.bytes == held | {"activations": 60, "transient": 5}


def test_the_optimizer_comes_last_and_its_state_stays() -> None:
    adam = Optimizer("adam", "foreach")
    finish = {0: optimizer_steps([parameter_bytes(25, element_bytes=4, optimizer=adam)], optimizer=adam, first=True)}
    (device,) = replay(
        build("gpipe", stages=1, microbatches=1), {0: SMALL}, [StaticBytes((100,))], setting=Setting(finish=finish)
    ).devices
    last = device.actions[-1]
    assert (last.peak.action, last.peak.node, last.peak.total_bytes) == (None, "optimizer", 500)
    assert last.peak.bytes == {"parameters": 100, "gradients": 100, "optimizer": 200, "transient": 100}
    assert last.left == {"parameters": 100, "gradients": 100, "optimizer": 200}


def test_casts_are_gone_when_the_optimizer_runs() -> None:
    own = traces(Stage((Layer(stream=1, hidden=4, weight=100, cast=50),)))
    finish = {0: (Step("optimizer", ((0, 7), (0, -7))),)}
    (device,) = replay(
        build("gpipe", stages=1, microbatches=2), {0: own}, [StaticBytes()], setting=Setting(finish=finish)
    ).devices
    assert device.actions[-2].left == {"casts": 100, "gradients": 200}
    assert device.actions[-1].peak.bytes == {"gradients": 200, "transient": 7}


def test_values_of_the_whole_batch_stay_until_the_last_microbatch() -> None:
    static = StaticBytes(whole_batch=(1000,))
    (device,) = replay(build("gpipe", stages=1, microbatches=2), {0: SMALL}, [static]).devices
    assert [entry.left.get("whole_batch") for entry in device.actions] == [1000, 1000, 1000, None]


def test_receives_posted_ahead_and_sends_not_done() -> None:
    schedule = build("gpipe", stages=3, microbatches=3)
    how = dict.fromkeys(range(3), SMALL)
    setting = Setting(posted_receives=2, pending_sends=1)
    replayed = replay(schedule, how, [StaticBytes()] * 3, setting=setting)
    extra = [entry.peak.bytes.get("transfers", 0) for entry in replayed.devices[1].actions]
    assert extra == [10 + 10, 10 + 20, 20 + 20, 20 + 20, 20 + 10, 10]
    first = [entry.peak.bytes.get("transfers", 0) for entry in replayed.devices[0].actions]
    assert first == [20 + 20, 20 + 20, 20 + 20, 20 + 20, 20, 0]


def peak_of(changes: list[tuple[int, int]]) -> int:
    live = most = 0
    for _, count in changes:
        live += count
        most = max(most, live)
    return most


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "forward"]),
    microbatches=st.integers(1, 6),
    recompute=st.sampled_from(["never", "block", "always", "except_last"]),
    setting=st.builds(
        Setting, gradients_held=st.booleans(), posted_receives=st.integers(0, 4), pending_sends=st.integers(0, 3)
    ),
    whole=st.sampled_from([0, 500]),
)
def test_the_stream_of_changes_peaks_where_the_replay_does(
    name: str, microbatches: int, recompute: Recompute, setting: Setting, whole: int
) -> None:
    virtual = 2 if name in ("interleaved", "zb_v") else 1
    schedule = build(name, stages=4, microbatches=microbatches, virtual_stages=virtual)
    how = {index: traces(stage, recompute) for index, stage in enumerate(model(4, cast=True))}
    static = [StaticBytes((50,), (7, 9), (whole,) if whole else ())] * 4
    replayed = replay(schedule, how, static, setting=setting)
    loads = [
        lane_loads(schedule, device=device, recompute=dict.fromkeys(range(4), recompute))
        for device in range(len(schedule.lanes))
    ]
    for device in range(len(schedule.lanes)):
        changes = list(device_changes(schedule, how, static, device=device, settings=[setting]))
        assert len({storage for storage, count in changes if count > 0}) == sum(count > 0 for _, count in changes)
        assert sum(count for _, count in changes) == 66 * virtual
        assert peak_of(changes) == replayed.peak_bytes[device]
        formula = lane_bytes(
            loads[device],
            how,
            static_bytes=66 * virtual,
            whole_batch_bytes=dict.fromkeys(range(4), whole),
            gradients_held=setting.gradients_held,
        )
        if not setting.posted_receives and not setting.pending_sends:
            assert formula.peak_bytes == replayed.peak_bytes[device]
        else:
            assert formula.peak_bytes <= replayed.peak_bytes[device]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_the_allocator_plays_the_same_step(name: str, *, expandable: bool) -> None:
    schedule = build(name, stages=4, microbatches=6)
    how = {index: traces(stage) for index, stage in enumerate(model(4))}
    static = [StaticBytes(parameters=(3 << 20, 5 << 20))] * 4
    replayed = replay(schedule, how, static).peak_bytes
    options = AllocatorOptions(expandable_segments=expandable)
    for device in range(4):
        changes = device_changes(schedule, how, static, device=device, settings=[Setting(), Setting()])
        reserved = simulate_allocator(changes, options=options)
        assert reserved.requested_peak_bytes == replayed[device]
        assert reserved.requested_bytes == reserved.allocated_bytes == 8 << 20
        assert reserved.reserved_bytes == reserved.reserved_peak_bytes == 22 << 20
        assert reserved.out_of_memory is None


def test_storages_without_bytes_are_no_changes() -> None:
    """A batch norm has one on the CPU: what comes and what goes cannot be told apart by the sign of nothing."""
    empty = StageTrace((Step("", ((X, 10), (Y, 0), (Y, 0))),), (Step("", ((X, -10),)),), (Step("", ((X, -10),)),))
    one = StageTraces(never=empty)
    changes = device_changes(build("gpipe", stages=1, microbatches=2), {0: one}, [StaticBytes()], device=0)
    assert [count for _, count in changes] == [10, 10, -10, -10]


def test_steps_follow_each_other() -> None:
    """The first step makes Adam's state; the second accumulates, so the gradients of the first stay for it."""
    adam = Optimizer("adam", "foreach")
    own = [parameter_bytes(25, element_bytes=4, optimizer=adam)]
    first, later = ({0: optimizer_steps(own, optimizer=adam, first=first)} for first in (True, False))
    schedule = build("gpipe", stages=1, microbatches=2)

    def play(held: bool) -> list[tuple[int, int]]:
        steps = (Setting(finish=first), Setting(gradients_held=held, finish=later))
        return list(device_changes(schedule, {0: SMALL}, [StaticBytes((100,))], device=0, settings=steps))

    fresh, accumulated = play(False), play(True)
    assert [sum(count for _, count in changes) for changes in (fresh, accumulated)] == [300, 300]
    assert peak_of(fresh) == 300 + 30 + 100 + 130
    assert peak_of(accumulated) == 300 + 60 + 100 + 130


def test_loads_are_what_the_literature_says() -> None:
    def most(name: str, device: int, what: str, *, stages: int = 4, microbatches: int = 12, virtual: int = 1) -> int:
        schedule = build(name, stages=stages, microbatches=microbatches, virtual_stages=virtual)
        loads = lane_loads(schedule, device=device, recompute=dict.fromkeys(range(stages), "never"))
        return max(sum(count for part, count in load.counts.items() if part.what == what) for load in loads)

    assert [most("gpipe", device, "saved") for device in range(4)] == [12] * 4
    assert [most("1f1b", device, "saved") for device in range(4)] == [4, 3, 2, 1]
    assert [most("1f1b", device, "waiting") for device in range(4)] == [0] * 4
    assert [most("zb_h1", device, "saved") for device in range(4)] == [4, 3, 2, 1]
    assert [most("zb_h1", device, "waiting") for device in range(4)] == [1, 2, 3, 4]
    assert [most("interleaved", device, "saved", stages=8, virtual=2) for device in range(4)] == [11, 9, 7, 5]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 6), (4, 12), (8, 20)])
def test_zb_h1_holds_what_its_paper_says(stages: int, microbatches: int) -> None:
    """Stage s holds `stages - s` microbatches whole and `s` waiting for W (arXiv 2401.10241, table 2), at each I."""
    schedule = build("zb_h1", stages=stages, microbatches=microbatches)
    for stage in range(stages):
        loads = lane_loads(schedule, device=stage, recompute={stage: "never"})
        counts = [
            (load.counts[Part(stage, "never", "saved")], load.counts[Part(stage, "never", "waiting")])
            for load in loads
            if load.kind == "I" and not load.first
        ]
        assert (stages - stage, stage) in counts
        assert max(saved + waiting for saved, waiting in counts) == stages


def test_gpipe_has_a_handful_of_loads() -> None:
    schedule = build("gpipe", stages=2, microbatches=5)
    loads = lane_loads(schedule, device=1, recompute={1: "never"})
    saved = Part(1, "never", "saved")
    assert [(load.kind, load.first, load.counts[saved]) for load in loads] == [
        ("F", True, 0),
        ("F", False, 4),
        ("B", True, 5),
        ("B", False, 4),
    ]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 400)] * 3),
    more=st.tuples(*[st.integers(0, 300)] * 3),
    microbatches=st.integers(1, 6),
    name=st.sampled_from(["gpipe", "1f1b"]),
    recompute=st.sampled_from(["never", "block", "always"]),
)
def test_peaks_grow_with_every_size_and_every_microbatch_held(
    sizes: tuple[int, ...], more: tuple[int, ...], microbatches: int, name: str, recompute: Recompute
) -> None:
    small = traces(Stage((Layer(*sizes),) * 2), recompute)
    large = traces(Stage((Layer(*(a + b for a, b in zip(sizes, more, strict=True))),) * 2), recompute)
    peaks = [
        [
            trace_bytes(
                own,
                static_bytes=0,
                in_flight=in_flight(name, stage=stage, stages=3, microbatches=microbatches),
                microbatches=microbatches,
            ).peak_bytes
            for stage in (2, 1, 0)
        ]
        for own in (small, large)
    ]
    assert peaks[0] == sorted(peaks[0])
    assert all(one <= other for one, other in zip(*peaks, strict=True))


def test_the_simple_formula_is_the_closed_form_when_gradients_are_held() -> None:
    own = traces(model(1)[0])
    pieces = own.pieces["never"]
    forward = pieces.piece("F", first=False, fresh=False)
    backward = pieces.piece("B", first=False, fresh=False)
    resident = forward.left["activations"]
    simple = stage_bytes(
        static_bytes=70,
        resident_bytes=resident,
        in_flight=3,
        transients=(forward.peak_bytes - resident, backward.peak_bytes),
    )
    assert simple == trace_bytes(own, static_bytes=70, in_flight=3, microbatches=8, gradients_held=True)


def test_except_last_has_no_closed_form() -> None:
    own = traces(model(1)[0], "except_last")
    with pytest.raises(ValueError, match="microbatches differ; use lane_bytes"):
        trace_bytes(own, static_bytes=0, in_flight=1, microbatches=1)


def test_a_stage_without_a_trace() -> None:
    with pytest.raises(ValueError, match="stage 1 has no trace or no static bytes"):
        replay(build("gpipe", stages=2, microbatches=1), {0: SMALL}, [STATIC, STATIC])
