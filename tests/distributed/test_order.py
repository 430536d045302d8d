"""One order of actions, sends and receives: complete, and free of deadlock by another simulator; or shown why not."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.distributed import order as module
from autosplit.distributed.order import Entry, Item, Receive, Send, arrivals, check_order, of_rank, step_order
from autosplit.errors import ScheduleError
from autosplit.runtime.transport import Way
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.validate import validate
from tests.distributed.orders import Lists, chain, drawn, ends
from tests.properties import examples

MODELS = pytest.mark.parametrize("rendezvous", [True, False])
NAMES = [*SCHEDULES, "shuffled"]
NAMED = pytest.mark.parametrize("name", NAMES)
CHANCE = st.integers(0, 2**32 - 1).map(random.Random)


def is_proved(lists: Lists, chance: random.Random, *, rendezvous: bool) -> bool:
    """Tell what `check_order` says of ranks' lists, in a random global order of them."""
    left = [deque(items) for items in lists]
    owners = [rank for rank, items in enumerate(lists) for _ in items]
    chance.shuffle(owners)
    try:
        check_order([Entry(rank, left[rank].popleft()) for rank in owners], len(lists), rendezvous=rendezvous)
    except ScheduleError:
        return False
    return True


@MODELS
@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_an_order_is_complete_and_no_rank_waits_for_ever(rendezvous: bool, name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    order = case.order(rendezvous=rendezvous)
    lists = case.lists(rendezvous=rendezvous)
    actions = tuple(tuple(item for item in items if isinstance(item, Action)) for items in lists)
    assert actions == case.schedule.lanes
    ways = Counter(way for taken in case.crossing().values() for way in taken)
    assert Counter(item.way for _, item in order if isinstance(item, Send)) == ways
    assert Counter(item.way for _, item in order if isinstance(item, Receive)) == ways
    assert len(order) == sum(map(len, actions)) + 2 * ways.total()
    if rendezvous:
        following = itertools.pairwise(order)
        assert all(after.item == Receive(e.item.way) for e, after in following if isinstance(e.item, Send))
    for _ in range(3):
        assert ends(case, lists, chance, rendezvous=rendezvous)
    assert ends(case, lists, chance, rendezvous=False), "what ends under rendezvous ends where entries only post"


@MODELS
@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_messages_stand_between_what_makes_and_what_takes_them(
    rendezvous: bool, name: str, chance: random.Random
) -> None:
    case = drawn(name, chance)
    lists = case.lists(rendezvous=rendezvous)
    place = {item: (rank, position) for rank, items in enumerate(lists) for position, item in enumerate(items)}
    channels: dict[Any, list[Way]] = defaultdict(list)
    for consumer, ways in case.crossing().items():
        for way, producer in ways.items():
            (source, made), (_, sends) = place[producer], place[Send(way)]
            (target, receives), (_, taken) = place[Receive(way)], place[consumer]
            assert place[Send(way)][0] == source != target == place[consumer][0]
            assert made < sends
            assert receives < taken
            assert not any(isinstance(item, Action) for item in lists[source][made + 1 : sends])
            channels[source, target].append(way)
    for found in channels.values():
        in_order = [sorted(found, key=lambda way, end=end: place[end(way)]) for end in (Send, Receive)]  # type: ignore[misc]
        assert in_order[0] == in_order[1]


@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_a_posted_receive_is_one_action_ahead_or_with_a_later_message_of_its_pair(
    name: str, chance: random.Random
) -> None:
    case = drawn(name, chance)
    lists = case.lists(rendezvous=False)
    sender = {item.way: rank for rank, items in enumerate(lists) for item in items if isinstance(item, Send)}
    consumer = {way: action for action, ways in case.crossing().items() for way in ways}
    for rank, items in enumerate(lists):
        lane, before, following = case.schedule.lanes[rank], len(case.schedule.lanes[rank]), dict[int, int]()
        for item in reversed(items):
            if isinstance(item, Action):
                before -= 1
            elif isinstance(item, Receive):
                ahead = max(lane.index(consumer[item.way]) - 1, 0)
                assert before == min(ahead, following.get(sender[item.way], ahead))
                following[sender[item.way]] = before


@NAMED
@settings(max_examples=examples(100, few=15))
@given(chance=CHANCE)
def test_rendezvous_costs_no_tick_where_actions_take_equally_long(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    free, end = [0] * case.ranks, dict[Item, int]()
    crossing, lists = case.crossing(), case.lists(rendezvous=True)
    rank_of = {item: rank for rank, items in enumerate(lists) for item in items}
    for rank, item in case.order(rendezvous=True):
        if isinstance(item, Action):
            free[rank] += 1
        elif isinstance(item, Send):
            other = rank_of[Receive(item.way)]
            free[rank] = free[other] = max(free[rank], free[other])
    left = [deque(lane) for lane in case.schedule.lanes]
    clock = [0] * case.ranks
    while any(left):
        for rank, lane in enumerate(left):
            while lane and all(maker in end for maker in crossing[lane[0]].values()):
                start = max([clock[rank], *(end[maker] for maker in crossing[lane[0]].values())])
                clock[rank] = end[lane.popleft()] = start + 1
    assert max(free) == max(clock)


@MODELS
@NAMED
def test_a_changed_order_is_refused_exactly_where_it_does_not_end(name: str, rendezvous: bool) -> None:
    chance, verdicts = random.Random(name), Counter[bool]()
    for _ in range(examples(400, few=60)):
        case = drawn(name, chance)
        lists = case.lists(rendezvous=rendezvous)
        for _ in range(chance.randint(1, 3)):
            items = chance.choice(lists)
            if len(items) > 1:
                items.insert(chance.randrange(len(items)), items.pop(chance.randrange(len(items))))
        expected = ends(case, lists, chance, rendezvous=rendezvous)
        assert is_proved(lists, chance, rendezvous=rendezvous) == expected, lists
        verdicts[expected] += 1
    assert min(verdicts[True], verdicts[False]) >= 5, verdicts


@NAMED
def test_receives_posted_ahead_may_deadlock_where_they_block(name: str) -> None:
    chance, verdicts = random.Random(name), Counter[bool]()
    for _ in range(60):
        case = drawn(name, chance)
        lists = case.lists(rendezvous=False)
        expected = ends(case, lists, chance, rendezvous=True)
        assert is_proved(lists, chance, rendezvous=True) == expected
        verdicts[expected] += 1
    assert verdicts[False] or name in ("forward", "looped_bfs", "gpipe"), verdicts


@NAMED
@settings(max_examples=examples(60, few=15))
@given(chance=CHANCE)
def test_a_message_shows_which_of_ones_own_have_been_taken(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    order, lists = case.order(rendezvous=False), case.lists(rendezvous=False)
    made = {way: (maker, taker) for taker, ways in case.crossing().items() for way, maker in ways.items()}
    place = {item: (rank, n) for rank, items in enumerate(lists) for n, item in enumerate(items)}
    for rank in range(len(lists)):
        found = arrivals(order, rank)
        received = [item.way for item in lists[rank] if isinstance(item, Receive)]
        sent = [item.way for item in lists[rank] if isinstance(item, Send)]
        assert found.keys() == set(received)
        assert len({way for ways in found.values() for way in ways}) == sum(map(len, found.values()))
        expected: dict[Way, list[Way]] = {way: [] for way in received}
        for way in sent:
            peer, taken = place[made[way][1]]
            later = [(place[made[own][0]][1], place[Send(own)][1], own) for own in received]
            later = [entry for entry in later if place[Send(entry[2])][0] == peer and entry[0] >= taken]
            if later:
                expected[min(later, key=lambda entry: entry[1])[2]].append(way)
        assert {way: set(ways) for way, ways in found.items()} == {way: set(ways) for way, ways in expected.items()}


def text(items: Iterable[Item]) -> str:
    return ", ".join(map(str, items))


def test_1f1b_of_two_stages() -> None:
    schedule = build("1f1b", stages=2, microbatches=2)
    order = step_order(schedule, chain(2))
    assert text(of_rank(order, 0)) == (
        "0F0, send 0F0 to stage 1, 0F1, send 0F1 to stage 1, receive 1B0 for stage 0, 0B0, receive 1B1 for stage 0, 0B1"
    )
    assert text(of_rank(order, 1)) == (
        "receive 0F0 for stage 1, 1F0, receive 0F1 for stage 1, 1B0, send 1B0 to stage 0, 1F1, 1B1, send 1B1 to stage 0"
    )
    order = step_order(schedule, chain(2), rendezvous=False)
    assert text(of_rank(order, 0)) == (
        "0F0, send 0F0 to stage 1, receive 1B0 for stage 0, 0F1, send 0F1 to stage 1, receive 1B1 for stage 0, 0B0, 0B1"
    )
    assert text(of_rank(order, 1)) == (
        "receive 0F0 for stage 1, 1F0, receive 0F1 for stage 1, 1B0, send 1B0 to stage 0, 1F1, 1B1, send 1B1 to stage 0"
    )


def test_a_skip_and_what_the_loss_takes_go_straight_to_their_users() -> None:
    schedule = build("gpipe", stages=3, microbatches=1)
    order = step_order(schedule, [set(), {0}, {0, 1}], [1, 2])
    assert text(of_rank(order, 0)) == (
        "0F0, send 0F0 to stage 1, send 0F0 to stage 2, receive 2B0 for stage 0, receive 1B0 for stage 0, 0B0"
    )
    assert text(of_rank(order, 1)) == (
        "receive 0F0 for stage 1, 1F0, send 1F0 to stage 2, send 1F0 of the loss to stage 2, "
        "receive 2B0 for stage 1, receive 2B0 of the loss for stage 1, 1B0, send 1B0 to stage 0"
    )
    assert text(of_rank(order, 2)) == (
        "receive 0F0 for stage 2, receive 1F0 for stage 2, receive 1F0 of the loss for stage 2, 2F0, 2B0, "
        "send 2B0 to stage 0, send 2B0 to stage 1, send 2B0 of the loss to stage 1"
    )


def test_a_split_backward_sends_behind_the_input_gradient() -> None:
    order = step_order(build("zb_h1", stages=2, microbatches=1), chain(2))
    assert text(of_rank(order, 1)) == "receive 0F0 for stage 1, 1F0, 1I0, send 1B0 to stage 0, 1W0"
    assert text(of_rank(order, 0)) == "0F0, send 0F0 to stage 1, receive 1B0 for stage 0, 0I0, 0W0"


def test_stages_of_one_rank_exchange_no_messages() -> None:
    order = step_order(build("zb_v", stages=2, microbatches=3), chain(2), [0])
    assert all(isinstance(item, Action) for _, item in order)


def test_a_send_is_no_receive() -> None:
    assert len({Send(Way(0, 1, 0)), Receive(Way(0, 1, 0))}) == 2


def lanes(*texts: str) -> Schedule:
    return Schedule("mine", tuple(tuple(map(Action.parse, one.split())) for one in texts))


@MODELS
def test_a_schedule_whose_actions_wait_for_each_other_is_refused_with_the_cycle(rendezvous: bool) -> None:
    schedule = lanes("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    with pytest.raises(ScheduleError) as caught:
        step_order(schedule, chain(3), rendezvous=rendezvous)
    assert str(caught.value) == (
        "schedule 'mine': deadlock: rank 1 is at '1B0' and waits for '2B0' of rank 2, "
        "rank 2 is at '2F1' and waits for '1F1' of rank 1; reorder one of these lanes"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(schedule)


def test_what_a_chain_forbids_and_the_graph_does_not_is_given_an_order() -> None:
    schedule = Schedule("mine", ((Action(0, "F", 0),), (Action(2, "F", 0), Action(1, "F", 0))), (0, 1, 1))
    with pytest.raises(ScheduleError, match="2F0 waits for 1F0"):
        validate(schedule)
    assert text(of_rank(step_order(schedule, [set(), {0}, {0}]), 1)) == (
        "receive 0F0 for stage 1, receive 0F0 for stage 2, 2F0, 1F0"
    )
    with pytest.raises(ScheduleError, match="rank 1 is at '2F0' and waits for '1F0' of rank 1"):
        step_order(schedule, chain(3))


HEAD_ON: Lists = [
    [
        Action(0, "F", 0),
        Send(Way(0, 1, 0)),
        Action(0, "F", 1),
        Send(Way(0, 1, 1)),
        Receive(Way(1, 0, 0, backward=True)),
        Action(0, "B", 0),
        Action(0, "B", 1),
    ],
    [
        Receive(Way(0, 1, 0)),
        Action(1, "F", 0),
        Action(1, "B", 0),
        Send(Way(1, 0, 0, backward=True)),
        Receive(Way(0, 1, 1)),
        Action(1, "F", 1),
        Action(1, "B", 1),
    ],
]


def entries(lists: Lists) -> list[Entry]:
    return [Entry(rank, item) for rank, items in enumerate(lists) for item in items]


def test_two_ranks_that_send_head_on_are_shown() -> None:
    with pytest.raises(ScheduleError) as caught:
        check_order(entries(HEAD_ON), 2)
    assert str(caught.value) == (
        "deadlock: rank 0 is at 'send 0F1 to stage 1' and waits for 'receive 0F1 for stage 1' of rank 1, "
        "rank 1 is at 'send 1B0 to stage 0' and waits for 'receive 1B0 for stage 0' of rank 0; "
        "reorder the entries of one of these ranks"
    )
    check_order(entries(HEAD_ON), 2, rendezvous=False)


def changed(rank: int, position: int, *items: Item) -> Lists:
    lists = [list(own) for own in HEAD_ON]
    lists[rank][position : position + 1] = items
    return lists


@MODELS
@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            changed(0, 0),
            "rank 0 has 'send 0F0 to stage 1' in a wrong place; put it behind the action that makes it, on",
        ),
        (
            changed(1, 5),
            "rank 1 has 'receive 0F1 for stage 1' in a wrong place; put it before the action that takes it",
        ),
        (changed(1, 2), "rank 0 has 'receive 1B0 for stage 0' and|rank 1 has 'send 1B0 to stage 0' in a wrong place"),
        (changed(0, 1), "rank 1 has 'receive 0F0 for stage 1', and no other rank has 'send 0F0 to stage 1'"),
        (changed(1, 4), "rank 0 has 'send 0F1 to stage 1', and no other rank has 'receive 0F1 for stage 1'"),
        (
            changed(0, 3, *[Send(Way(0, 1, 1))] * 2),
            "rank 0 has 'send 0F1 to stage 1', and rank 0 once more; remove one",
        ),
        (changed(1, 6, Action(0, "B", 1)), "rank 0 has '0B1', and rank 1 once more; remove one"),
        (
            changed(0, 6, Send(Way(0, 2, 1)), Receive(Way(0, 2, 1)), Action(2, "F", 1)),
            "rank 0 has 'send 0F1 to stage 2', and no other rank has 'receive 0F1 for stage 2'",
        ),
        ([*HEAD_ON[:1], []], "no other rank has"),
    ],
)
def test_an_order_that_is_none_is_refused(lists: Lists, message: str, rendezvous: bool) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_order(entries(lists), 2, rendezvous=rendezvous)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not_is_refused(rank: int) -> None:
    with pytest.raises(ScheduleError, match=f"'0F0' is of rank {rank}; there are 2 ranks, 0 on"):
        check_order([Entry(rank, Action(0, "F", 0))], 2)


@MODELS
def test_an_order_is_proved_before_it_is_returned(rendezvous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[Any] = []
    monkeypatch.setattr(module, "check_order", lambda *given, **model: proved.append((*given, model)))
    order = step_order(build("1f1b", stages=2, microbatches=2), chain(2), rendezvous=rendezvous)
    assert proved == [(order, 2, {"rendezvous": rendezvous})]


@MODELS
def test_a_pair_of_ranks_has_one_order_of_its_messages(rendezvous: bool) -> None:
    lists: Lists = [
        [Action(0, "F", 0), Send(Way(0, 1, 0)), Action(0, "F", 1), Send(Way(0, 1, 1))],
        [Receive(Way(0, 1, 1)), Receive(Way(0, 1, 0)), Action(1, "F", 0), Action(1, "F", 1)],
    ]
    with pytest.raises(ScheduleError) as caught:
        check_order(entries(lists), 2, rendezvous=rendezvous)
    assert str(caught.value) == (
        "rank 0 has 'send 0F0 to stage 1' where rank 1 has 'receive 0F1 for stage 1'; "
        "receive from a rank in the order in which it sends"
    )


def lines_run(microbatches: int, *, rendezvous: bool) -> int:
    """Count the lines that a proof runs."""
    order = step_order(build("1f1b", stages=4, microbatches=microbatches), chain(4), rendezvous=rendezvous)
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        check_order(order, 4, rendezvous=rendezvous)
    finally:
        sys.settrace(before)
    return count


@MODELS
def test_a_proof_takes_time_linear_in_the_order(rendezvous: bool) -> None:
    once, twice, four_times = (lines_run(count, rendezvous=rendezvous) for count in (32, 64, 128))
    assert once > 32
    assert four_times - twice == pytest.approx(2 * (twice - once), rel=0.02)
