"""The examples of ``cost_models/README.md`` are run."""

from __future__ import annotations

import doctest
from pathlib import Path

import cost_models


def test_the_examples_run_and_say_what_they_say():
    readme = Path(cost_models.__file__).parent / "README.md"
    result = doctest.testfile(str(readme), module_relative=False, encoding="utf-8")
    assert result.attempted >= 25
    assert result.failed == 0
