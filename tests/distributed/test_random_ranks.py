"""Random modules over several processes have the bits of one process; the processes are the same for all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.processes import Pool
from tests.distributed.training import Training, compare, squares
from tests.models.random_modules import Recipe, build, make_batch, recipes
from tests.properties import examples

SCHEDULES = ("gpipe", "1f1b", "zb_h1")


def _batch(recipe: Recipe, rows: int) -> Any:
    return make_batch(recipe, rows=rows, gradients=False)


def trained(recipe: Recipe, rows: int, later: int, chunks: int, schedule: str) -> list[str]:
    """Compare the trainings of a recipe's module; called in every process."""
    make, batch = functools.partial(build, recipe), functools.partial(_batch, recipe)
    if not any(parameter.requires_grad for parameter in make().parameters()):
        return []
    training = Training(make, batch, squares, rows=(rows, later, rows), chunks=chunks)
    try:
        return compare(training, {"schedule": schedule})
    except RuntimeError as error:
        if "does not depend on any parameter" in str(error):
            return []
        raise


@pytest.mark.quick
@settings(max_examples=examples(200, few=2))
@given(
    recipe=recipes(),
    rows=st.integers(1, 13),
    later=st.integers(1, 13),
    chunks=st.integers(1, 6),
    size=st.integers(2, 3),
    schedule=st.sampled_from(SCHEDULES),
)
def test_random_modules_have_the_bits_of_one_process(
    ranks: Pool, recipe: Recipe, rows: int, later: int, chunks: int, size: int, schedule: str
) -> None:
    assert ranks(size).run(trained, recipe, rows, later, chunks, schedule)[0] == []
