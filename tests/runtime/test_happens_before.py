"""The checker of logs: it knows a race, and what makes it none."""

from __future__ import annotations

import pytest

from tests.runtime.happens_before import HOST, Entry, Free, Keep, Op, Record, Wait, is_before, problems

MAKE, USE = Op("a", "make", writes=(1,), allocates=(1,)), Op("b", "use", reads=(1,))
DONE, SEEN, AGAIN = Record("a", 1), Wait("b", 1), Op("a", "next", writes=(2,), allocates=(2,))
BACK = [Record("b", 2), Wait("a", 2)]


@pytest.mark.parametrize("log", [[MAKE, USE], [MAKE, DONE, USE, SEEN], [DONE, MAKE, SEEN, USE]])
def test_a_use_that_does_not_wait_is_a_race(log: list[Entry]) -> None:
    assert problems(log) == ["b: use reads memory 1 that a has written, unordered"]


def test_a_use_that_waits_is_none() -> None:
    log: list[Entry] = [MAKE, DONE, SEEN, USE]
    assert problems(log) == []
    assert is_before(log, MAKE, USE)
    assert not is_before([MAKE, USE], MAKE, USE)


def test_order_goes_on_from_stream_to_stream_and_through_the_host() -> None:
    through: list[Entry] = [MAKE, DONE, Wait("c", 1), Record("c", 3), Wait("b", 3), USE]
    assert problems(through) == []
    assert problems([MAKE, DONE, Wait(HOST, 1), USE]) == []


def test_a_write_waits_for_the_readers() -> None:
    change = Op("a", "change", writes=(1,))
    assert problems([MAKE, DONE, SEEN, USE, change]) == ["a: change writes memory 1 that b has used, unordered"]
    assert problems([MAKE, DONE, SEEN, USE, *BACK, change]) == []


def test_free_memory_is_given_away_at_the_next_allocation() -> None:
    used: list[Entry] = [MAKE, DONE, SEEN, USE]
    assert problems([*used, Free(1), AGAIN]) == ["a: next may get memory 1 that b still uses, too early"]
    assert problems([*used, Free(1)]) == []
    assert problems([*used, *BACK, Free(1), AGAIN]) == []
    assert problems([*used, Free(1), *BACK, AGAIN]) == []
    assert problems([*used, Keep("b", 1), Free(1), AGAIN]) == []
    assert problems([*used, Free(1), Op("b", "other pool", writes=(2,), allocates=(2,))]) == []
