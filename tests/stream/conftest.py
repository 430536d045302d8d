"""Minibatches and a pipe for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stream.streams import Pair, Skipping, pair, words


@pytest.fixture(scope="module")
def items() -> list[tuple[Any, Any]]:
    torch.manual_seed(1)
    return words(12)


@pytest.fixture
def own(request: pytest.FixtureRequest, items: list[tuple[Any, Any]]) -> Pair:
    """Return a pipe; what it is parametrised with is the replicas of its stages."""
    made = pair(Skipping, items[0][0], replicas=getattr(request, "param", None))
    made.find_stages(items[0])
    return made
