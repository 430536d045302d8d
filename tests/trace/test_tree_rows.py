"""Rows count as independent only where everything that was asked says so; the model is as before, whatever it does."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.options import Sample
from autosplit.trace.tree_rows import OutputRows, TreeFindings, agree, examine, sizes_of
from tests.trace.row_models import DEPENDENT, INDEPENDENT, WIDTH, Helper, Net, per_row


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


COUNT = 0


def ask(model: nn.Module, *args: Any, batch_dims: Any = None, chunks: int = 4, **kwargs: Any) -> TreeFindings:
    sample = Sample(*args, **kwargs)
    return examine(model, sample, batch_dims=batch_dims, chunks=chunks, forward=model.forward)


def everything(model: nn.Module) -> Any:
    """Return all of a model, and the random states, in a form that can be compared."""
    tensors = [t.detach().clone().tolist() for t in (*model.parameters(), *model.buffers())]
    gradients = [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()]
    held = [{k: repr(v) for k, v in m.__dict__.items() if not k.startswith("_")} for m in model.modules()]
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return tensors, gradients, held, drawn


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.parametrize("grad", [True, False])
def test_independent(name: str, grad: bool) -> None:
    body, outputs = INDEPENDENT[name]
    model = Net(body).eval()
    before = everything(model)
    with torch.set_grad_enabled(grad):
        found = ask(model, rows())
    assert found == TreeFindings(None, (0,), tuple(outputs))
    assert everything(model) == before


def test_batch_in_another_dimension() -> None:
    model = Net(lambda net, x: net.layer(x.permute(1, 0, 2)))
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    assert ask(model, x, batch_dims=1) == TreeFindings(None, (1,), (OutputRows(0, 1),))
    assert ask(model, x) == TreeFindings(None, (0,), (OutputRows(1, 1),))  # there every dimension but one is rows


def test_inputs_without_a_batch_dimension_and_constants() -> None:
    model = Net(lambda net, x, mask, scale: net.layer(x) * mask * scale)
    found = ask(model, rows(), mask=torch.ones(1, WIDTH), scale=2.0)
    assert (found.why, found.batch_dims) == (None, (0, None, None))


@pytest.mark.parametrize("name", DEPENDENT)
def test_not_independent(name: str) -> None:
    body, text = DEPENDENT[name]
    model = Net(body, stack=[], helper=Helper(), array=np.zeros(3), hidden=None).train()
    model.layer.weight.grad = torch.ones_like(model.layer.weight)
    x = rows().requires_grad_(name not in ("its input", "memory"))
    before, given = everything(model), x.tolist()
    found = ask(model, x)
    assert found.why is not None
    assert text in found.why
    after = everything(model)
    if name not in ("helper", "array"):  # what only the caller's Python can see is not given back
        assert after == before
    assert x.tolist() == given
    assert x.grad is None


def test_globals_that_methods_store_to_are_found() -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            global COUNT
            COUNT += 1
            return self.layer(x)

    assert "Own.forward writes to variables outside of the model" in str(ask(Own(per_row), rows()).why)


def test_a_list_of_images_or_an_unknown_object_is_not_cut() -> None:
    model = Net(lambda net, xs: [net.layer(x) for x in xs])
    assert ask(model, [rows(3), rows(3), rows(3)]).why == "an input is a list of tensors"
    assert ask(model, (rows(3), rows(3))).why == "an input is a list of tensors"
    assert "Helper" in str(ask(Net(lambda net, x, other: net.layer(x)), rows(), other=Helper()).why)
    assert ask(model, deque([rows(3)])).why == "an input is a list of tensors"


def test_sizes_that_disagree_or_are_too_few() -> None:
    model = Net(lambda net, x, y: net.layer(x) + y)
    assert "no common batch dimension" in str(ask(model, rows(4), rows(3), batch_dims=0).why)
    assert ask(Net(per_row), rows(1)).why == "there is only one row"
    assert ask(Net(per_row), rows(4), chunks=1).why == "chunks is 1"


def test_equal_rows_prove_nothing() -> None:
    model = Net(lambda net, x: net.layer(x.double()))
    assert "all rows of its batch are equal" in str(ask(model, torch.ones(6, WIDTH, dtype=torch.int64)).why)
    found = ask(model, torch.arange(6 * WIDTH).reshape(6, WIDTH))
    assert found.why is None


def test_a_model_that_fails_on_few_rows_is_not_cut() -> None:
    def needs_four(net: Net, x: Tensor) -> Tensor:
        if len(x) < 4:
            raise ArithmeticError("four rows at least")
        return net.layer(x)

    assert "ArithmeticError: four rows at least" in str(ask(Net(needs_four), rows()).why)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "parameter", "accumulated"])
def test_hooks_see_whole_batches(kind: str) -> None:
    model = Net(per_row)
    {
        "forward": lambda: model.layer.register_forward_hook(lambda *_: None),
        "pre": lambda: model.layer.register_forward_pre_hook(lambda *_: None),
        "backward": lambda: model.layer.register_full_backward_hook(lambda *_: None),
        "accumulated": lambda: model.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None),
        "parameter": lambda: model.layer.weight.register_hook(lambda gradient: None),
    }[kind]()
    assert "hooks" in str(ask(model, rows()).why)


def test_the_proof_holds_no_gradients_and_no_hooks() -> None:
    model = Net(per_row)
    model.layer.weight.grad = given = torch.ones_like(model.layer.weight)
    assert ask(model, rows()).why is None
    assert model.layer.weight.grad is given
    assert given.eq(1).all()
    assert model.layer.bias.grad is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_models_own_hooks_are_the_callers_matter() -> None:
    model = Net(per_row)
    model.register_forward_hook(lambda *_: None)
    assert ask(model, rows()).why is None


def test_meta_has_no_values() -> None:
    assert "meta" in str(ask(copy.deepcopy(Net(per_row)).to("meta"), rows().to("meta")).why)


# -- parts -----------------------------------------------------------------------------------------------------------
def test_sizes_are_those_of_tensor_split() -> None:
    for count in range(1, 12):
        for pieces in range(1, count + 1):
            assert sizes_of(count, pieces) == [len(part) for part in torch.arange(count).tensor_split(pieces)]


def test_agreement() -> None:
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert agree(nan, nan.clone(), 0.0)
    assert agree(nan, nan * 1.0000001, 1e-3)
    assert not agree(nan, nan.nan_to_num(0.0), 1e-3)
    assert not agree(torch.tensor([1.0]), torch.tensor([1.0 + 1e-6]), 0.0)
    assert not agree(torch.tensor([1.0]), torch.tensor([1.1]), 1e-3)
    assert not agree(torch.ones(2), torch.ones(3), 1.0)
    assert not agree(torch.ones(2), torch.ones(2, dtype=torch.float64), 1.0)
    assert agree(torch.ones(0), torch.ones(0), 0.0)
    assert not agree(torch.tensor([1]), torch.tensor([2]), 0.0)
    assert not agree(torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), 1e-3)


def test_what_a_forward_sets_on_a_module_is_set_once_per_call() -> None:
    def hooked(net: Any, x: Tensor) -> Tensor:
        net.layer.register_forward_hook(lambda module, given, output: output * 0.5)
        return net.layer(x)

    def registered(net: Any, x: Tensor) -> Tensor:
        net.register_parameter("scale", nn.Parameter(torch.ones(WIDTH, dtype=torch.float64)))
        return net.layer(x) * net.scale

    for body in (hooked, registered):
        model = Net(body)
        assert "it sets parameters, buffers, modules or hooks" in str(ask(model, rows()).why)
        assert not model.layer._forward_hooks
        assert not hasattr(model, "scale")
        pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=3)
        with pytest.warns(UserWarning, match="has collapsed"):
            results = [(pipe(rows()), model(rows())) for _ in range(3)]
        for mine, own in results:
            torch.testing.assert_close(mine, own, rtol=0, atol=0)
