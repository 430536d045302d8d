"""The simulator of lists against that of schedules, and against times that a hand can check."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import SCHEDULES, build, stages_per_device
from autosplit.schedule.entry import Entry, Send, parse_entry
from autosplit.schedule.lists import Actions
from autosplit.schedule.order import lane_lists, with_reductions, with_updates
from autosplit.schedule.simulate import TransferTime, simulate
from autosplit.schedule.simulate_lists import simulate_lists
from tests.distributed.orders import Case, catalogued


def spans(lists: Sequence[Sequence[Entry]], seconds: Any, **asked: Any) -> dict[str, tuple[float, float]]:
    found = simulate_lists(lists, seconds=seconds, **asked)
    assert [[span.entry for span in device] for device in found] == [list(entries) for entries in lists]
    return {str(span.entry): (span.start_s, span.end_s) for device in found for span in device}


def drawn(name: str, chance: random.Random) -> Case:
    """Return a schedule, also with replicas, whose stages take values of those before and of some others."""
    least = stages_per_device(name)
    virtual = chance.choice([2, 3]) if SCHEDULES[name].virtual_stages is None else least
    replicas = tuple(chance.randint(1, 3) for _ in range(4)) if name == "1f1b" and chance.random() < 0.5 else ()
    stages = len(replicas) or virtual * chance.randint(1, 6 // virtual)
    schedule = build(name, stages=stages, microbatches=chance.randint(3, 9), virtual_stages=virtual, replicas=replicas)
    return Case(schedule, [{s for s in range(t) if s == t - 1 or chance.random() < 0.2} for t in range(stages)], set())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("receives", ["ahead", "described", "taken", None])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_list_takes_what_its_schedule_does(name: str, receives: Any, seed: int) -> None:
    """Same starts and ends of all actions, wherever receives stand, to the last bit."""
    chance = random.Random(f"{name} {seed}")
    case = drawn(name, chance)
    times = {kind: [chance.uniform(1, 3) for _ in case.sources] for kind in "FBIW"}
    travels = {(s, t): (chance.random(), chance.random()) for t, taken in enumerate(case.sources) for s in taken}
    timeline = simulate(
        case.schedule,
        forward_s=times["F"],
        backward_s=times["B"],
        input_gradient_s=times["I"],
        weight_gradient_s=times["W"],
        transfers=[TransferTime(*pair, *both) for pair, both in travels.items()],
    )

    def seconds(entry: Entry) -> float:
        if isinstance(entry, Action):
            return times[entry.kind][entry.stage]
        assert isinstance(entry, Send)
        route = entry.route
        pair = (route.target, route.source) if route.backward else (route.source, route.target)
        return travels[pair][route.backward]

    lists = lane_lists(case.schedule, case.sources) if receives is None else case.lists(receives=receives)
    found = spans(lists, seconds)
    assert {str(span.action): (span.start_s, span.end_s) for span in timeline.spans} == {
        text: span for text, span in found.items() if isinstance(parse_entry(text), Action)
    }


def test_linear_lists_are_those_of_the_order() -> None:
    case = catalogued("zb_v", random.Random(3))
    order = case.lists(receives="taken")
    assert [list(entries) for entries in lane_lists(case.schedule, case.sources, case.losses)] == order


def test_sums_go_on_beside_the_last_backward() -> None:
    """Buckets of B begin as their parts are done, one after the other; those of W when all is done."""
    schedule = Schedule(
        "two stages", ((Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0), Action(0, "B", 0)),), (0, 0)
    )
    entries = with_updates(with_reductions(schedule.lanes[0]))
    found = spans(
        [entries], lambda entry: 4.0 if isinstance(entry, Action) else 1.0, buckets_s={1: [3.0] * 2, 0: [1.0] * 4}
    )
    assert found["1REDUCE_GRAD"] == (
        10,
        16,
    )  # beside 1B0, 8 to 12: buckets at 10 and 12, the second waits for the first
    assert found["0REDUCE_GRAD"] == (16, 20)  # beside 0B0, 12 to 16, when the link is free
    assert (found["0UPDATE"], found["1UPDATE"]) == ((20, 21), (21, 22))
    split = [parse_entry(text) for text in "0F0 0I0 0W0 0REDUCE_GRAD 0UPDATE".split()]
    assert spans([split], lambda _: 1.0, buckets_s={0: [0.5, 0.5]})["0UPDATE"] == (4, 5)
    apart = [parse_entry(text) for text in "0F0 0B0 1F0 1B0 0REDUCE_GRAD 0UPDATE".split()]
    assert spans([apart], lambda _: 1.0, buckets_s={0: [0.5, 0.5]})["0REDUCE_GRAD"] == (4, 5)


def test_an_action_waits_for_its_stage_to_be_gathered() -> None:
    """A gather goes on beside what stands behind it, one after the other."""
    entries = [parse_entry(text) for text in "0UNSHARD 0F0 1UNSHARD 0F1 1F0 1RESHARD".split()]
    times = {"0UNSHARD": 2.0, "1UNSHARD": 3.0, "1RESHARD": 0.0}
    found = spans([entries], lambda entry: times.get(str(entry), 1.0))
    assert list(found.values()) == [(0, 2), (2, 3), (3, 6), (3, 4), (6, 7), (7, 7)]


def test_a_message_that_nobody_sends() -> None:
    lists = Actions.parse("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0")
    with pytest.raises(ScheduleError, match="no message that '0B0' can go on with"):
        simulate_lists(lists, seconds=lambda _: 1.0)
