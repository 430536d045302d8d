"""A training over several processes has the bits of the same plan in one process, of random modules too."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.models import DEAR, LONG, TRAININGS
from tests.distributed.processes import Pool
from tests.distributed.training import Training, compare, squares
from tests.models.random_modules import Recipe, build, make_batch, recipes
from tests.pairwise import in_turn
from tests.properties import examples

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "zb_h1": {"schedule": "zb_h1"},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "looped_bfs": {"schedule": "looped_bfs", "virtual_stages": 2},
    "zb_v": {"schedule": "zb_v", "virtual_stages": 2},
}
RECOMPUTE = ("always", "except_last", "block")


def in_20_steps(name: str) -> list[str]:
    training = TRAININGS[name]
    return compare(replace(training, rows=tuple(islice(cycle(training.rows), 20))), {})


def _slow(values: Iterable[str], slow: Collection[str]) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow if value in slow else ()) for value in values]


@pytest.mark.quick
@pytest.mark.parametrize("name", _slow(TRAININGS, DEAR - {"tied gpt with dropout"}))
def test_a_training_has_the_bits_of_one_process(ranks: Pool, name: str) -> None:
    assert ranks(3).run(compare, name, {})[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_20_steps_on_4_ranks_have_the_bits_of_one_process(ranks: Pool, name: str) -> None:
    assert ranks(4).run(in_20_steps, name)[0] == []


@pytest.mark.quick
@in_turn(schedule=list(SCHEDULES), name=("dropout", "relative bias"))
def test_every_schedule_has_the_bits_of_one_process(ranks: Pool, schedule: str, name: str) -> None:
    assert ranks(2).run(compare, name, SCHEDULES[schedule])[0] == []


@in_turn(schedule=("1f1b", "zb_h1", "zb_v"), recompute=RECOMPUTE, name=("dropout", "tied gpt with dropout"))
def test_recomputing_has_the_bits_of_one_process(ranks: Pool, schedule: str, recompute: str, name: str) -> None:
    options = {**SCHEDULES[schedule], "recompute": recompute}
    assert ranks(2).run(compare, name, options)[0] == []


@pytest.mark.parametrize("name", ["dropout", pytest.param("tied gpt with dropout", marks=pytest.mark.slow)])
def test_random_numbers_by_counter_have_the_bits_of_one_process(ranks: Pool, name: str) -> None:
    assert ranks(2).run(compare, name, {"rng": "counter"})[0] == []


def test_a_norm_of_the_whole_batch_has_the_bits_of_one_process(ranks: Pool) -> None:
    assert ranks(2).run(compare, "batch norm", {"batch_norm": "full"})[0] == []


def test_an_action_file_of_the_users_own(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "actions.csv"
    path.write_text("0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1F2,1B1,1B2,1F3,1B3\n", encoding="utf-8")
    assert ranks(2).run(compare, "relative bias", {"schedule": str(path)})[0] == []


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
    schedule=st.sampled_from(("gpipe", "1f1b", "zb_h1")),
)
def test_random_modules_have_the_bits_of_one_process(
    ranks: Pool, recipe: Recipe, rows: int, later: int, chunks: int, size: int, schedule: str
) -> None:
    assert ranks(size).run(trained, recipe, rows, later, chunks, schedule)[0] == []
