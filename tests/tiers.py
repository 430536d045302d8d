"""Which tests a quick run, a full run and a campaign take: by what their cases cost, and by marks.

A quick run leaves out what is slow, a full run what is of a campaign, which is slow, too. ``costs.txt`` says how many
CPU seconds of all processes a case of a dear test takes; ``--update-costs`` measures those that it runs.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

COSTS = Path(__file__).with_name("costs.txt")
QUICK_S, FULL_S = 0.5, 2.0
"""Of one test a run takes as many cases as fit into so many seconds, and at least one."""
DEAR_S = 2.0
"""No case that takes longer is in a quick run, unless the test is marked quick."""
_TICKS = os.sysconf("SC_CLK_TCK")


def costs() -> dict[str, float]:
    """Return the seconds that a case takes, by the test's name."""
    lines = COSTS.read_text(encoding="utf-8").splitlines()
    return {name: float(seconds) for seconds, name in map(str.split, lines)}


def deal(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that a quick run leaves out as slow, and those that a full run leaves out as of a campaign.

    Which ones is drawn once, by the test's name, so that the values of every parameter turn up.
    """
    seconds = costs()
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("campaign"):
            item.add_marker(pytest.mark.slow)
        elif test_of(item) in seconds:
            tests[test_of(item)].append(item)
    for name, cases in tests.items():
        cost = seconds[name]
        least = 1 if cost <= DEAR_S or cases[0].get_closest_marker("quick") else 0
        for item in _left(name, [case for case in cases if not _is_slow(case)], max(least, int(QUICK_S / cost))):
            item.add_marker(pytest.mark.slow)
        for item in _left(name, [case for case in cases if _is_slow(case)], max(1, int(FULL_S / cost))):
            item.add_marker(pytest.mark.campaign)


def test_of(item: pytest.Item) -> str:
    """Return a test's name without its case."""
    return item.nodeid.partition("[")[0]


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _left(name: str, cases: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """Return the cases but ``number``: each of those takes the most values of parameters that none has had before."""
    left = random.Random(name).sample(cases, len(cases))
    seen: set[tuple[int, str]] = set()
    for _ in range(min(number, len(cases))):
        best = max(left, key=lambda case: len(_values(case) - seen))
        left.remove(best)
        seen |= _values(best)
    return left


def _values(item: pytest.Item) -> set[tuple[int, str]]:
    return set(enumerate(item.nodeid.partition("[")[2].split("-")))


class Meter:
    """Measures what tests cost, in whichever process they run, and writes it down where the run is controlled."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}
        self._cases: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._cases.update(map(test_of, items))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = _cpu_s()
        result = yield
        self._found.setdefault(test_of(item), []).append(_cpu_s() - begin)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        found, self._cases = node.workeroutput["costs"]
        for name, seconds in found.items():
            self._found.setdefault(name, []).extend(seconds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = self._found, self._cases
            return
        new = {name: round(median(seconds), 2) for name, seconds in self._found.items()}
        known = {name: seconds for name, seconds in costs().items() if name not in new}
        dear = {name: seconds for name, seconds in new.items() if seconds * self._cases[name] > QUICK_S}
        lines = [f"{seconds} {name}\n" for name, seconds in sorted((known | dear).items())]
        COSTS.write_text("".join(lines), encoding="utf-8")


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of all below it."""
    used, below = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        used[path.parent.name] = sum(map(int, fields[11:15])) / _TICKS
        below[fields[1]].append(path.parent.name)
    total, left = 0.0, [str(os.getpid())]
    while left:
        process = left.pop()
        total += used.get(process, 0.0)
        left += below[process]
    return total
