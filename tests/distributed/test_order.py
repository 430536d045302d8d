"""One order of actions, sends and receives: complete, and free of deadlock by another simulator; or shown why not."""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx.algorithms import dag

from autosplit.errors import ScheduleError
from autosplit.schedule import order as module
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.entry import Entry, Issued, Receive, Route, Send
from autosplit.schedule.lists import Actions
from autosplit.schedule.order import Receives, arrivals, check_order, of_device, step_order
from autosplit.schedule.validate import validate
from tests.distributed.orders import Case, Lists, chain, drawn, ends
from tests.properties import examples

NAMES = [*SCHEDULES, "shuffled"]
NAMED = pytest.mark.parametrize("name", NAMES)
CHANCE = st.integers(0, 2**32 - 1).map(random.Random)


def is_proved(lists: Lists, chance: random.Random) -> bool:
    """Tell what `check_order` says of devices' lists, in a random global order of them."""
    left = [deque(items) for items in lists]
    owners = [rank for rank, items in enumerate(lists) for _ in items]
    chance.shuffle(owners)
    try:
        check_order([Issued(rank, left[rank].popleft()) for rank in owners], len(lists))
    except ScheduleError:
        return False
    return True


@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_an_order_is_complete_and_no_rank_waits_for_ever(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    order = case.order()
    lists = case.lists()
    actions = tuple(tuple(item for item in items if isinstance(item, Action)) for items in lists)
    assert actions == case.schedule.lanes
    routes = Counter(route for taken in case.crossing().values() for route in taken)
    assert Counter(item.route for _, item in order if isinstance(item, Send)) == routes
    assert Counter(item.route for _, item in order if isinstance(item, Receive)) == routes
    assert len(order) == sum(map(len, actions)) + 2 * routes.total()
    for rendezvous in (True, True, True, False):
        assert ends(case, lists, chance, rendezvous=rendezvous)


@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_messages_stand_between_what_makes_and_what_takes_them(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    lists = case.lists()
    place = {item: (rank, position) for rank, items in enumerate(lists) for position, item in enumerate(items)}
    channels: dict[Any, list[Route]] = defaultdict(list)
    for consumer, routes in case.crossing().items():
        for route, producer in routes.items():
            (source, made), (_, sends) = place[producer], place[Send(route)]
            (target, receives), (_, taken) = place[Receive(route)], place[consumer]
            assert place[Send(route)][0] == source != target == place[consumer][0]
            assert made < sends
            assert receives < taken
            assert not any(isinstance(item, Action) for item in lists[source][made + 1 : sends])
            channels[source, target].append(route)
    for found in channels.values():
        in_order = [sorted(found, key=lambda route, end=end: place[end(route)]) for end in (Send, Receive)]  # type: ignore[misc]
        assert in_order[0] == in_order[1]


def ticks(case: Case) -> dict[Entry, int]:
    """Return when each action ends where it takes one tick and messages take none."""
    left, clock, end = [deque(lane) for lane in case.schedule.lanes], [0] * case.ranks, dict[Entry, int]()
    while any(left):
        for rank, lane in enumerate(left):
            while lane and all(maker in end for maker in case.takes(lane[0]).values()):
                start = max([clock[rank], *(end[maker] for maker in case.takes(lane[0]).values())])
                clock[rank] = end[lane.popleft()] = start + 1
    return end


@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_a_receive_is_posted_when_its_message_begins_to_be_made(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    end = ticks(case)
    maker = {route: action for routes in case.crossing().values() for route, action in routes.items()}
    for items in case.lists():
        for position, item in enumerate(items):
            if isinstance(item, Receive):
                before, behind = (
                    [e for e in part if isinstance(e, Action)] for part in (items[:position], items[position:])
                )
                assert all(end[action] < end[maker[item.route]] for action in before)
                assert all(end[action] >= end[maker[item.route]] for action in behind)


@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_rendezvous_costs_no_tick_where_actions_take_equally_long(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    free, arrival, posted = [0] * case.ranks, dict[Route, int](), dict[Route, int]()
    end, crossing = ticks(case), case.crossing()
    for rank, item in case.order():
        if isinstance(item, Receive):
            posted[item.route] = free[rank]
        elif isinstance(item, Send):
            arrival[item.route] = free[rank] = max(free[rank], posted[item.route])
        else:
            free[rank] = 1 + max([free[rank], *(arrival[route] for route in crossing[item])])
            assert free[rank] <= end[item]


@NAMED
def test_a_changed_order_is_refused_exactly_where_it_does_not_end(name: str) -> None:
    chance, verdicts = random.Random(name), Counter[bool]()
    for _ in range(examples(400, few=60)):
        case = drawn(name, chance)
        lists = case.lists()
        for _ in range(chance.randint(1, 3)):
            items = chance.choice(lists)
            if len(items) > 1:
                items.insert(chance.randrange(len(items)), items.pop(chance.randrange(len(items))))
        expected = ends(case, lists, chance, rendezvous=True)
        assert is_proved(lists, chance) == expected, lists
        verdicts[expected] += 1
    assert min(verdicts[True], verdicts[False]) >= 5, verdicts


@NAMED
@settings(max_examples=examples(60, few=15))
@given(chance=CHANCE)
def test_a_message_shows_which_of_ones_own_have_been_taken(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    order, lists = case.order(), case.lists()
    made = {route: (maker, taker) for taker, routes in case.crossing().items() for route, maker in routes.items()}
    place = {item: (rank, n) for rank, items in enumerate(lists) for n, item in enumerate(items)}
    for rank in range(len(lists)):
        found = arrivals(order, rank)
        received = [item.route for item in lists[rank] if isinstance(item, Receive)]
        sent = [item.route for item in lists[rank] if isinstance(item, Send)]
        assert found.keys() == set(received)
        assert len({route for routes in found.values() for route in routes}) == sum(map(len, found.values()))
        expected: dict[Route, list[Route]] = {route: [] for route in received}
        for route in sent:
            peer, taken = place[made[route][1]]
            later = [(place[made[own][0]][1], place[Send(own)][1], own) for own in received]
            later = [entry for entry in later if place[Send(entry[2])][0] == peer and entry[0] >= taken]
            if later:
                expected[min(later, key=lambda entry: entry[1])[2]].append(route)
        assert {route: set(routes) for route, routes in found.items()} == {
            route: set(routes) for route, routes in expected.items()
        }


@NAMED
@settings(max_examples=examples(60, few=15))
@given(chance=CHANCE)
def test_a_first_step_ends_where_receives_wait_for_descriptions(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    assert ends(case, case.lists(receives="described"), chance, rendezvous=True, receives="described")


def text(items: Iterable[Entry]) -> str:
    return ", ".join(map(str, items))


def test_1f1b_of_two_stages() -> None:
    schedule = build("1f1b", stages=2, microbatches=2)
    order = step_order(schedule, chain(2))
    assert text(of_device(order, 0)) == ("0F0, 0SEND_F0, 0F1, 0SEND_F1, 0RECV_B0, 0B0, 0RECV_B1, 0B1")
    assert text(of_device(order, 1)) == ("1RECV_F0, 1RECV_F1, 1F0, 1B0, 1SEND_B0, 1F1, 1B1, 1SEND_B1")


def test_a_first_step_of_1f1b_receives_what_is_described() -> None:
    order = step_order(build("1f1b", stages=2, microbatches=2), chain(2), receives="described")
    assert text(of_device(order, 0)) == ("0F0, 0SEND_F0, 0F1, 0SEND_F1, 0RECV_B0, 0B0, 0RECV_B1, 0B1")
    assert text(of_device(order, 1)) == ("1RECV_F0, 1F0, 1RECV_F1, 1B0, 1SEND_B0, 1F1, 1B1, 1SEND_B1")


def test_a_skip_and_what_the_loss_takes_go_straight_to_their_users() -> None:
    schedule = build("gpipe", stages=3, microbatches=1)
    order = step_order(schedule, [set(), {0}, {0, 1}], [1, 2])
    assert text(of_device(order, 0)) == ("0F0, 0SEND_F0, 0SEND_F0(2), 0RECV_B0(2), 0RECV_B0, 0B0")
    assert text(of_device(order, 1)) == (
        "1RECV_F0, 1F0, 1SEND_F0, 1SEND_F0(2 loss), 1RECV_B0, 1RECV_B0(2 loss), 1B0, 1SEND_B0"
    )
    assert text(of_device(order, 2)) == (
        "2RECV_F0(0), 2RECV_F0, 2RECV_F0(1 loss), 2F0, 2B0, 2SEND_B0(0), 2SEND_B0, 2SEND_B0(1 loss)"
    )


def test_a_split_backward_sends_behind_the_input_gradient() -> None:
    order = step_order(build("zb_h1", stages=2, microbatches=1), chain(2))
    assert text(of_device(order, 1)) == "1RECV_F0, 1F0, 1I0, 1SEND_B0, 1W0"
    assert text(of_device(order, 0)) == "0F0, 0SEND_F0, 0RECV_B0, 0I0, 0W0"


def test_stages_of_one_rank_exchange_no_messages() -> None:
    order = step_order(build("zb_v", stages=2, microbatches=3), chain(2), [0])
    assert all(isinstance(item, Action) for _, item in order)


def test_a_send_is_no_receive() -> None:
    assert len({Send(Route(0, 1, 0)), Receive(Route(0, 1, 0))}) == 2


def lanes(*texts: str) -> Schedule:
    return Schedule("mine", tuple(tuple(map(Action.parse, one.split())) for one in texts))


def test_a_schedule_whose_actions_wait_for_each_other_is_refused_with_the_cycle() -> None:
    schedule = lanes("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    with pytest.raises(ScheduleError) as caught:
        step_order(schedule, chain(3))
    assert str(caught.value) == (
        "schedule 'mine': deadlock: '1B0' of device 1 waits for '2B0' of device 2, "
        "'2F1' of device 2 waits for '1F1' of device 1; reorder one of these devices"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(schedule)


def test_what_a_chain_forbids_and_the_graph_does_not_is_given_an_order() -> None:
    schedule = Schedule("mine", ((Action(0, "F", 0),), (Action(2, "F", 0), Action(1, "F", 0))), (0, 1, 1))
    with pytest.raises(ScheduleError, match="2F0 waits for 1F0"):
        validate(schedule)
    assert text(of_device(step_order(schedule, [set(), {0}, {0}]), 1)) == ("1RECV_F0, 2RECV_F0(0), 2F0, 1F0")
    with pytest.raises(ScheduleError, match="'2F0' of device 1 waits for '1F0' of device 1"):
        step_order(schedule, chain(3))


HEAD_ON: Lists = [
    list(*Actions.parse("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0B1")),
    list(*Actions.parse("1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1")),
]


def entries(lists: Lists) -> list[Issued]:
    return [Issued(rank, item) for rank, items in enumerate(lists) for item in items]


def test_two_ranks_that_send_head_on_are_shown() -> None:
    with pytest.raises(ScheduleError) as caught:
        check_order(entries(HEAD_ON), 2)
    assert str(caught.value) == (
        "order: deadlock: '0SEND_F1' of device 0 waits for '1RECV_F1' of device 1, "
        "'1SEND_B0' of device 1 waits for '0RECV_B0' of device 0; reorder one of these devices"
    )


def changed(rank: int, position: int, *items: Entry) -> Lists:
    lists = [list(own) for own in HEAD_ON]
    lists[rank][position : position + 1] = items
    return lists


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (changed(0, 0), "device 0 has '0SEND_F0', and not the action that makes it"),
        (changed(1, 5), "device 1 has '1RECV_F1', and not the action that takes it"),
        (changed(1, 2), "device 1 has '1SEND_B0', and not the action that makes it"),
        (changed(0, 1), "device 1 has '1RECV_F0', and no other device has '0SEND_F0'"),
        (changed(1, 4), "device 0 has '0SEND_F1', and no other device has '1RECV_F1'"),
        (changed(0, 3, *[Send(Route(0, 1, 1))] * 2), "device 0 has '0SEND_F1', and device 0 once more; remove one"),
        (changed(1, 6, Action(0, "B", 1)), "device 0 has '0B1', and device 1 once more; remove one"),
        (
            changed(0, 6, Send(Route(0, 2, 1)), Receive(Route(0, 2, 1)), Action(2, "F", 1)),
            "device 0 has '0SEND_F1\\(2\\)', and no other device has '2RECV_F1\\(0\\)'",
        ),
        ([*HEAD_ON[:1], []], "no other device has"),
        # sent before it is made, or received after it is taken
        ([[Send(Route(0, 1, 0)), Action(0, "F", 0)], HEAD_ON[1][:2]], "0SEND_F0.* for '0F0'"),
        ([HEAD_ON[0][:2], [Action(1, "F", 0), Receive(Route(0, 1, 0))]], "'1F0' of device 1 waits for '0SEND_F0'"),
    ],
)
def test_an_order_that_is_none_is_refused(lists: Lists, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_order(entries(lists), 2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not_is_refused(rank: int) -> None:
    with pytest.raises(ScheduleError, match=f"'0F0' is of device {rank}; there are 2 devices, 0 on"):
        check_order([Issued(rank, Action(0, "F", 0))], 2)


def test_an_order_is_proved_before_it_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[Any] = []
    monkeypatch.setattr(module, "check_order", lambda *given, receives: proved.append((*given, receives)))
    kinds: tuple[Receives, ...] = get_args(Receives)
    orders = [step_order(build("1f1b", stages=2, microbatches=2), chain(2), receives=kind) for kind in kinds]
    assert [(tuple(entries), *rest) for entries, *rest in proved] == [
        (o, 2, k) for o, k in zip(orders, kinds, strict=True)
    ]


def test_a_pair_of_devices_has_one_order_of_its_messages() -> None:
    lists: Lists = [
        [Action(0, "F", 0), Send(Route(0, 1, 0)), Action(0, "F", 1), Send(Route(0, 1, 1))],
        [Receive(Route(0, 1, 1)), Receive(Route(0, 1, 0)), Action(1, "F", 0), Action(1, "F", 1)],
    ]
    with pytest.raises(ScheduleError) as caught:
        check_order(entries(lists), 2)
    assert str(caught.value) == (
        "device 0 has '0SEND_F0' where device 1 has '1RECV_F1'; receive from a device in the order in which it sends"
    )


def lines_run(microbatches: int) -> int:
    """Count the lines that a proof runs."""
    order = step_order(build("1f1b", stages=4, microbatches=microbatches), chain(4))
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in (module.__file__, dag.__file__):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        check_order(order, 4)
    finally:
        sys.settrace(before)
    return count


def test_a_proof_takes_time_linear_in_the_order() -> None:
    once, twice, four_times = (lines_run(count) for count in (32, 64, 128))
    assert once > 32
    assert four_times - twice == pytest.approx(2 * (twice - once), rel=0.02)
