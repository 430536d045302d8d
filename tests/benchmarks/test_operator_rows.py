"""Operators of torch's database are run by rows only where rows are independent; the benchmark asks them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from autosplit.trace.graph import NodeClass
from benchmarks import operator_rows
from benchmarks.operator_rows import Around, Case, Judged, Verdict, judge, judged_apart, operators, summary

NAMES = ("sort", "argsort", "msort", "cummax", "topk", "roll", "gather", "tril", "triu")


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_run_by_rows_only_where_rows_are_apart(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [j for o in operators() if o.name == name for j in judged_apart(o, count=3, seed=1)]
    assert found
    assert not summary(found)["listed"]["micro_but_mixes"]


def named(name: str, function: Callable[[Tensor], Tensor], rows: Tensor, dim: int = 0) -> Case:
    leaves, spec = tree_flatten((rows, (), {}))
    return Case(name, Around(function, spec, leaves, [0]), (rows,), dim)


FAULTS = {
    "a mean": lambda x: x - x.mean(0),
    "a mean in bfloat16": lambda x: x.bfloat16() - x.bfloat16().mean(0),
    "a mean in half": lambda x: (x - 0.1 * x.mean(0)).half(),
    "a backward that mixes": lambda x: (x - x.detach() + 1e-3 * (x - x.detach()).sum(0)).float(),
    "a value of all rows": lambda x: x.new_full((3,), float(x.sum())),
    "a triangle": lambda x: x.T.tril(1).T,
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_judge_finds_a_fault_where_a_classifier_says_micro(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = named(name, FAULTS[name], torch.randn(6, 3, dtype=torch.float64))
    info = SimpleNamespace(random=False, node_class=NodeClass.MICRO)
    wrong = SimpleNamespace(compute_nodes=lambda: [(None, info)], min_rows=1)
    monkeypatch.setattr(operator_rows, "trace", lambda *_, **__: SimpleNamespace(graph=wrong))
    verdict = judge(case)
    assert verdict.ran == "micro"
    assert not verdict.apart


@pytest.mark.parametrize("name", ["bfloat16", "half", "float", "new_full", "new_ones", "new_zeros"])
def test_rounding_and_constants_are_no_faults(name: str) -> None:
    found = [j for o in operators() if o.name == name for j in judged_apart(o, count=3, seed=1)]
    assert found
    assert not summary(found)["listed"]["micro_but_mixes"]


def test_the_summary_lists_what_is_wrong() -> None:
    wrong = Judged("sort", "sort [(6,)]", Verdict("micro", apart=False, why="outputs differ"))
    found = summary([wrong, Judged("sort", "sort [(6, 2)]", Verdict("full", apart=True))])
    assert found["micro_but_mixes"] == 1
    assert found["full_but_apart"] == 1
    assert found["listed"]["micro_but_mixes"] == ["sort [(6,)] outputs differ"]
