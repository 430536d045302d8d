"""Commands run in the process of the tests, so they put the folders of users' models on its path."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
