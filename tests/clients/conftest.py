"""The libraries that train pipes warn of things that are not a pipe's."""

from __future__ import annotations

import pytest

_ALLOWED = (
    "ignore:.*does not have many workers.*",
    "ignore:.*isinstance\\(treespec, LeafSpec\\).*",
    "ignore:.*pin_memory.*",
    "ignore:.is_gradient_checkpointing. is deprecated",  # PEFT asks for it
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for line in _ALLOWED:
            item.add_marker(pytest.mark.filterwarnings(line))
