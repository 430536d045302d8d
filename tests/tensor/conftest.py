"""Groups of processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Return processes by their number: ``ranks(2).run(function, ...)``."""
    pool = Pool()
    yield pool
    pool.close()
