"""Operators of torch's database are run by rows only where rows are independent; the benchmark asks them all."""

from __future__ import annotations

import warnings

import pytest

from benchmarks.operator_rows import Judged, Verdict, judged_apart, operators, summary

NAMES = ("sort", "argsort", "msort", "cummax", "topk", "roll", "gather", "searchsorted", "nn.functional.normalize")


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_run_by_rows_only_where_rows_are_apart(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [j for o in operators() if o.name == name for j in judged_apart(o, count=3, seed=1)]
    assert found
    assert not summary(found)["listed"]["micro_but_mixes"]


def test_the_summary_lists_what_is_wrong() -> None:
    wrong = Judged("sort", "sort [(6,)]", Verdict("micro", apart=False, why="outputs differ"))
    found = summary([wrong, Judged("sort", "sort [(6, 2)]", Verdict("full", apart=True))])
    assert found["micro_but_mixes"] == 1
    assert found["full_but_apart"] == 1
    assert found["listed"]["micro_but_mixes"] == ["sort [(6,)] outputs differ"]
