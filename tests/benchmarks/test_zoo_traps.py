"""Every trap of the zoo by name: split, run forward and backward, and compared with the plain model."""

from __future__ import annotations

import pytest

from benchmarks.zoo.case import Case
from benchmarks.zoo.catalog import cases
from benchmarks.zoo.measure import measure
from benchmarks.zoo.table import verdict

TRAPS = {case.name: case for case in cases(("traps",))}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAPS.values(), ids=TRAPS.keys())
def test_a_trap_gives_the_plain_numbers(case: Case):
    found = measure(case)
    assert verdict(found) == "equal", found.get("error", found["checks"])
    assert found["names_exact"]
    assert found["switch_exact"]
