"""Planning on the first call, pinned plans, and the program that can be read."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autosplit import Plan, Sample, autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, assert_same_bits, forward_backward
from tests.models.named import CASES, numbers, tokens
from tests.pairwise import in_turn

NAMES = ("chain", "nested skips", "shared weight", "tiny gpt", "lstm batch first", "weight norm", "keyword inputs")


def split(model: nn.Module, **options: Any) -> nn.Module:
    return autosplit(model, **({"devices": ["cpu"] * 3, "chunks": 4} | options))


def partition(plan: Plan) -> list[tuple[str, ...]]:
    return [stage.nodes for stage in plan.stages]


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]


@in_turn(name=NAMES, call=["train", "eval", "no_grad", "step"])
def test_the_first_call_is_as_if_planning_had_not_happened(name: str, call: str) -> None:
    case = CASES[name]
    plain, model = case.build(), case.build()
    for module in (plain, model):
        module.train(call not in ("eval", "no_grad"))
        module.zero_grad()
    pipe = split(model)
    assert pipe.plan is None
    flags = [module.training for module in model.modules()]
    batch, states = case.batch(8), random_states()
    if call == "step":
        pipe.train_step(*batch.args, **batch.kwargs, target=numbers(8, seed=1), loss_fn=_loss)
        assert all(parameter.grad is not None for parameter in model.parameters())
    else:
        with torch.set_grad_enabled(call != "no_grad"):
            pipe(*batch.args, **batch.kwargs)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(pipe.plan, Plan)
    assert random_states() == states
    assert [module.training for module in model.modules()] == flags
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    for tensor in batch.tensors().values():
        assert tensor.grad is None or call == "step"


def test_gradients_that_were_there_are_kept_by_the_first_call() -> None:
    plain, model = CASES["chain"].build(), CASES["chain"].build()
    for module in (plain, model):
        module(numbers(4, 6)).sum().backward()
    pipe = split(model)
    kept = [parameter.grad for parameter in model.parameters()]
    pipe(numbers(8, 6))
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), kept, strict=True))
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "Sample"])
def test_every_form_of_sample_plans_at_once(form: str) -> None:
    if form in ("tensor", "tuple"):
        case = CASES["chain"]
        value = case.batch(8).args[0]
        sample: Any = value if form == "tensor" else (value,)
    else:
        case = CASES["keyword inputs"]
        kwargs = case.batch(8).kwargs
        sample = kwargs if form == "dict" else Sample(**kwargs)
    plain, pipe = case.build(), split(case.build(), sample=sample)
    planned = pipe.plan
    assert isinstance(planned, Plan)
    assert_equal_runs(forward_backward(pipe, case.batch(10)), forward_backward(plain, case.batch(10)))
    assert pipe.plan == planned


@in_turn(name=NAMES, form=["text", "path", "plan"])
def test_a_pinned_plan_gives_the_same_stages(name: str, form: str, tmp_path: Path) -> None:
    case = CASES[name]
    first = split(case.build())
    run = forward_backward(first, case.batch(8))
    path = tmp_path / "plan.json"
    first.plan.save(path)
    assert Plan.load(path) == first.plan
    pinned = {"text": str(path), "path": path, "plan": first.plan}[form]
    second = split(case.build(), plan=pinned)
    assert_same_bits(forward_backward(second, case.batch(8)), run)
    assert partition(second.plan) == partition(first.plan)
    assert second.plan.chunks == first.plan.chunks


def test_a_plan_made_for_one_mode_and_length_serves_others(tmp_path: Path) -> None:
    case = CASES["tiny gpt"]
    first = split(case.build())
    forward_backward(first, Batch((tokens(8, 6),)))
    path = tmp_path / "plan.json"
    first.plan.save(path)
    plain, pipe = case.build().eval(), split(case.build().eval(), plan=path)
    batch = Batch((tokens(5, 9),))
    with torch.no_grad():
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert partition(pipe.plan) == partition(first.plan)


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    value = getattr(output, "logits", output)
    return (value.flatten(1) - target[:, None]).pow(2).mean()


def test_batches_do_not_live_on_in_the_pipe():
    pipe = autosplit(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), devices=2, chunks=3)
    for rows in (6, 7):
        batch = torch.ones(rows, 4)
        seen = weakref.ref(batch)
        pipe(batch).sum().backward()
        pipe.train_step(batch, target=batch, loss_fn=nn.MSELoss())
        del batch
        gc.collect()
        assert seen() is None
