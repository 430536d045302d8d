"""One browser for the tests of the report's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import StepTimeline
from autosplit.report.page import page
from tests.report.browser import MISSING, Opened, programs, started


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if programs() is None:
        pytest.skip(MISSING)
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(chrome: Chrome, tmp_path: Path) -> Callable[..., Opened]:
    def open_plan(plan: Plan, *, measured: StepTimeline | None = None, **how: Any) -> Opened:
        path = tmp_path / "plan.html"
        path.write_text(page(plan, measured=measured), encoding="utf-8")
        return Opened(chrome, path, **how)

    return open_plan
