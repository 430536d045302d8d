"""A model run by its own Python leaves what the plain one does: outputs, gradients, buffers, counters, random state."""

from __future__ import annotations

import copy

import pytest
import torch

from autosplit.options import Sample
from autosplit.planning.plan import Plan
from autosplit.planning.tree import plan_tree
from autosplit.runtime.lanes import lane
from autosplit.runtime.tree import TreeRun
from tests.equivalence.tree_models import CASES, CPU, caller, differences, left, options, pair, seed, split


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_the_plain_models(name: str, stages: int, training: bool) -> None:
    case = CASES[name]
    plain, twin, run = pair(case, training=training, stages=stages)
    pieces = stages > 1 and case.independent[not training]
    for step, count in enumerate([10, 7, 3, 2 if name == "batch norm" else 1, 10]):
        args = case.batch(count, step)
        seed(step)
        expected = left(plain, plain, args)
        seed(step)
        found = left(twin, caller(run), args)
        assert list(differences(found, expected, tolerance=1e-12 if pieces else 0.0)) == []
        assert (run.findings(args, {}).why is None) == (pieces and count > 1)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("name", ["early exit", "layer drop", "counter"])
def test_several_seeds(name: str, number: int) -> None:
    plain, twin, run = pair(CASES[name], training=True, stages=3)
    args = CASES[name].batch(6, number)
    seed(number)
    expected = [left(plain, plain, args) for _ in range(3)]
    seed(number)
    found = [left(twin, caller(run), args) for _ in range(3)]
    for mine, theirs in zip(found, expected, strict=True):
        assert list(differences(mine, theirs)) == []


@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 20])
def test_any_number_of_chunks(chunks: int) -> None:
    plain, twin, run = pair(CASES["tied"], training=True, stages=2, chunks=chunks)
    args = CASES["tied"].batch(10, 5)
    expected, found = left(plain, plain, args), left(twin, caller(run), args)
    assert list(differences(found, expected, tolerance=1e-12)) == []


@pytest.mark.parametrize("name", ["per row", "tied", "batch norm"])
def test_the_same_bits_run_after_run(name: str) -> None:
    case = CASES[name]
    _, twin, run = pair(case, training=False, stages=3)
    _, other, again = pair(case, training=False, stages=3)
    args = case.batch(11, 1)
    first = left(twin, caller(run), args)
    for _ in range(8):
        torch.ones(3, requires_grad=True).exp().sum().backward()  # what else the caller's thread does
        assert list(differences(left(twin, caller(run), args), first)) == []
        assert list(differences(left(other, caller(again), args), first)) == []


def test_under_autocast_the_same_bits_run_after_run() -> None:
    plain, twin, run = pair(CASES["tied"], training=False, stages=3)
    plain.float(), twin.float()
    args = (CASES["tied"].batch(11, 1)[0].float(),)
    found = []
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(left(twin, caller(run), args))
    with torch.autocast("cpu", torch.bfloat16):
        expected = left(plain, plain, args)
    assert all(list(differences(one, found[0])) == [] for one in found)
    for name, value in found[0].outputs.items():  # the gradients here are sums of bfloat16 that nearly cancel
        assert torch.allclose(value, expected.outputs[name], rtol=3e-2, atol=3e-2)
    assert {value.dtype for value in found[0].outputs.values()} == {value.dtype for value in expected.outputs.values()}


@pytest.mark.parametrize("name", ["per row", "early exit"])
def test_double_backward_is_ordinary(name: str) -> None:
    plain, twin, run = pair(CASES[name], training=True, stages=3)
    found = []
    for model, call in ((plain, plain), (twin, caller(run))):
        (x,) = CASES[name].batch(6, 2)
        x.requires_grad_()
        output = call(x)
        output = output["logits"] if isinstance(output, dict) else output
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [x, *model.parameters()], allow_unused=True))
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_training_with_an_optimizer_made_before() -> None:
    case = CASES["per row"]
    torch.manual_seed(3)
    plain = case.model().double()
    twin = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, twin)]
    run, _ = split(twin, case.batch(10, 0), stages=3)
    for step in range(4):
        for call, optimizer in zip((plain, caller(run)), optimizers, strict=True):
            optimizer.zero_grad()
            call(*case.batch(10, step))["logits"].square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["per row", "early exit"])
def test_without_gradients(name: str, mode: type) -> None:
    plain, twin, run = pair(CASES[name], training=False, stages=3)
    args = CASES[name].batch(9, 4)
    with mode():
        expected = left(plain, plain, args, backward=False)
        found = left(twin, caller(run), args, backward=False)
        again = left(twin, caller(run), tuple(t.clone() for t in args), backward=False)
    assert list(differences(found, expected, tolerance=1e-12)) == []
    assert list(differences(again, found)) == []


def test_a_plan_from_a_file_is_applied_again(tmp_path: object) -> None:
    case = CASES["tied"]
    torch.manual_seed(3)
    plain = case.model().double()
    made = plan_tree(plain, Sample(*case.batch(10, 0)), options(3), reason="a test says so")
    path = f"{tmp_path}/plan.json"
    made.plan.save(path)
    twin = copy.deepcopy(plain)
    run = TreeRun(twin, Plan.load(path).stage_of(), [lane(CPU)] * 3, chunks=4)
    args = case.batch(10, 6)
    expected, found = left(plain, plain, args), left(twin, caller(run), args)
    assert list(differences(found, expected, tolerance=1e-12)) == []
    assert run.units == tuple(name.partition("#")[0] for stage in made.plan.stages for name in stage.nodes)
