"""Groups of processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Pool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Return processes by their number: ``ranks(2).run(function, ...)``.

    They end with a file's tests: every group of gloo has a thread that polls, and hundreds take a third of a core.
    """
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[Pool]:
    """Return processes whose messages go as NCCL brings them: without tags, by rendezvous, in groups of two."""
    pool = Pool(as_nccl=True)
    yield pool
    pool.close()
