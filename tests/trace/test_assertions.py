"""Reads that only decide whether a model raises are operations of the graph, and answered so that it goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions
from torch.nn import functional as F

from autosplit import Sample, autosplit
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.ladder import trace
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH, Model
from tests.pairwise import mostly_slow


# pytest rewrites ``assert``, so these raise themselves
def draws(net: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    normal = distributions.Normal(net.a(x), F.softplus(net.b(x)) + 0.1)
    drawn = normal.rsample()
    return drawn, normal.log_prob(drawn)


def chooses(net: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    choice = distributions.Categorical(logits=net.b(torch.relu(net.a(x))))
    return choice.log_prob(choice.sample()), choice.entropy()


def asserts(net: Model, x: Tensor) -> Tensor:
    h = net.a(x)
    if h.max() >= 50:
        raise AssertionError("too large")
    if not torch.isfinite(h).all():
        raise FloatingPointError(f"not finite: {h.shape}")
    return net.b(torch.relu(h))


def asserts_a_mean(net: Model, x: Tensor) -> Tensor:
    h = net.a(x)
    if not x.mean() + 0 * h.mean() < 1:
        raise ValueError("a large mean")
    return net.b(torch.relu(h))


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def node_classes(net: Model) -> dict[str, NodeClass]:
    found = trace(net, Sample(batch(7)))
    assert not found.whole
    infos = [node.meta[INFO] for node in found.graph.graph.nodes if INFO in node.meta]
    return {info.name: info.node_class for info in infos}


@pytest.mark.parametrize("body", mostly_slow([draws, chooses, asserts, asserts_a_mean], draws, asserts_a_mean))
def test_equal_to_the_plain_model_in_all_microbatches(body: Callable[..., Any]) -> None:
    plain = Model(body)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for number, rows in enumerate((7, 5)):
        torch.manual_seed(number)
        expected = forward_backward(plain, Batch((batch(rows, number),)))
        torch.manual_seed(number)
        assert_equal_runs(forward_backward(pipe, Batch((batch(rows, number),))), expected)
    assert pipe.plan.rung == "recorded"


@pytest.mark.parametrize("body", [draws, asserts])
def test_checks_of_all_rows_run_by_microbatch(body: Callable[..., Any]) -> None:
    assert NodeClass.FULL not in node_classes(Model(body)).values()


def test_a_check_of_a_mean_sees_the_whole_batch_and_all_else_runs_by_microbatch() -> None:
    found = node_classes(Model(asserts_a_mean))
    assert [found[name] for name in ("a#0", "#0/relu_0", "b#0")] == [NodeClass.MICRO] * 3
    assert found["#0/bool_0"] is NodeClass.FULL


def test_one_row_that_breaks_a_check_of_the_mean_does_not_raise() -> None:
    net = Model(asserts_a_mean)
    pipe = autosplit(net, devices=["cpu"] * 2, chunks=3)
    x = batch(6)
    x[:2] += 2
    assert x.mean() < 1
    torch.testing.assert_close(pipe(x), net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_a_check_that_fails_raises_what_the_model_raises(value: float) -> None:
    net = Model(asserts)
    pipe = autosplit(net, devices=["cpu"] * 2, chunks=3)
    pipe(batch(6))
    x = batch(6)
    x[4] = value
    raised = []
    for module in (net, pipe):
        with pytest.raises((AssertionError, FloatingPointError)) as error:
            module(x)
        raised.append((error.type, str(error.value)))
    assert raised[0][0] is raised[1][0]
    assert raised[0][1] == "too large" if value == 1e6 else raised[1][1].startswith("a check of the model's values")
    assert raised[0][0] is not AssertionError or raised[0] == raised[1]


def test_arguments_of_a_distribution_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile turns the checks off for the rest of the process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    pipe = autosplit(Model(draws), devices=["cpu"] * 2, chunks=3)
    pipe(batch(6))
    with pytest.raises(ValueError, match="check of the model's values failed"):
        pipe(torch.full((6, WIDTH), float("nan"), dtype=torch.float64))
