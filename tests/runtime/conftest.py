"""What the tests of lanes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.watching import Watch


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 the default, so that sums in another order agree to rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def no_watch_yet() -> Iterator[None]:
    """Watch nothing but what the test itself watches."""
    with Watch.fresh():
        yield
