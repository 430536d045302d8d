from __future__ import annotations

import inspect

import pytest

import autosplit
import cost_models
from autosplit import compat, errors

ERRORS = [
    name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.AutosplitError)
]


def test_the_public_names_are_there():
    assert {"autosplit", "Plan", "Sample", "PipelinedModule", *ERRORS} <= set(autosplit.__all__)


def test_the_tree_of_errors():
    assert "AutosplitError" in ERRORS
    assert len(ERRORS) == 9


@pytest.mark.parametrize("package", [autosplit, compat, cost_models])
def test_all_lists_what_exists_once(package):
    assert len(set(package.__all__)) == len(package.__all__)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in (autosplit, compat, cost_models) for name in package.__all__]
)
def test_public_names_are_documented(package, name):
    value = getattr(package, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), name
        first = inspect.getdoc(value).partition("\n\n")[0]
        assert first.rstrip()[-1] in ".:", first
