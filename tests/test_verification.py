"""verify(): equal where a pipe is its model, not equal where it is not, and nothing of either is left changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autosplit import InputError, Sample, autosplit, verify
from tests.equivalence.equality import LANES
from tests.models.named import CASES, numbers
from tests.models.three_layers import WIDTH, Model


def split(model: nn.Module, **options: Any) -> Any:
    return autosplit(model, **({"devices": ["cpu"] * 3, "chunks": 4} | options))


def networks() -> nn.Sequential:
    """Norms behind norms, of every kind of momentum, and dropout between them."""
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None),
        nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6),
    ).double()  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pipes_are_their_models(name: str) -> None:
    model, batch = CASES[name].build(), CASES[name].batch(8)
    found = verify(model, split(model), Sample(*batch.args, **batch.kwargs))
    assert found, str(found)
    assert found.notes == ()
    assert {item.run for item in found.items} == {"train", "eval"}
    assert {item.kind for item in found.items} >= {"output", "gradient"}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), lambda output, target: (output - target).abs().mean()])
def test_norms_and_dropout_are_proved_as_far_as_they_can_be(lanes: str, loss_fn: Callable[..., Tensor]) -> None:
    model = networks()
    found = verify(model, split(model, lanes=lanes), numbers(10, 6), target=numbers(10, 6, seed=1), loss_fn=loss_fn)
    assert found, str(found)
    assert [item.kind for item in found.items if item.run == "train_step"].count("loss") == 1
    assert len(found.notes) == 1
    assert found.notes[0].startswith("train, train_step: 1, 4, 7 take statistics")
    assert "3, 3, 2, 2 rows" in found.notes[0]
    assert [item.name for item in found.items if item.kind == "draws"] == ["generator", "generator"]


def test_draws_of_a_counter_are_compared_as_constants() -> None:
    model = networks()
    found = verify(model, split(model, rng="counter"), numbers(10, 6))
    assert found, str(found)
    assert "random numbers are drawn per microbatch" in found.notes[1]
    assert [item.name for item in found.items if item.kind == "draws"] == ["same seed", "another seed"]


def test_neither_the_model_nor_the_pipe_notices() -> None:
    model = networks()
    model[8].eval()
    pipe, value = split(model), numbers(10, 6, gradient=True)
    pipe(value).sum().backward()
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda leaf, name=name: calls.append(name))
    parameters, buffers = list(model.parameters()), list(model.buffers())
    gradients, contents = [p.grad for p in parameters], [p.grad.clone() for p in parameters]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own, flags = value.grad, [m.training for m in (pipe, *model.modules())]
    states = [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]
    assert verify(model, pipe, value, target=numbers(10, 6, seed=1), loss_fn=nn.MSELoss())
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p is q for p, q in zip(model.buffers(), buffers, strict=True))
    assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
    assert all(torch.equal(p.grad, content) for p, content in zip(parameters, contents, strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert value.grad is own
    assert [m.training for m in (pipe, *model.modules())] == flags
    assert [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())] == states
    assert calls == []


def test_a_loss_with_parameters_and_a_tensor_beside_them() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.weight * (output - target) ** 2).mean()

    model = Model(lambda m, x: m.b(m.a(x)) * m.scale, scale=torch.ones(1, dtype=torch.float64, requires_grad=True))
    loss = Weighted()
    found = verify(model, split(model), numbers(8, WIDTH), target=numbers(8, WIDTH, seed=1), loss_fn=loss)
    assert found, str(found)
    names = {(item.run, item.name) for item in found.items if item.kind == "gradient"}
    assert {("train_step", "loss_fn.weight"), ("train_step", "scale"), ("train", "scale")} <= names
    assert loss.weight.grad is None
    assert model.scale.grad is None


def test_gradients_of_inputs_and_changed_inputs_are_compared() -> None:
    def body(model: Any, value: Tensor, other: Tensor) -> Tensor:
        other.mul_(2)
        return model.b(model.a(value) * other)

    model = Model(body)
    found = verify(model, split(model), (numbers(8, WIDTH, gradient=True), numbers(8, WIDTH, seed=1)))
    assert found, str(found)
    assert {("input", "1"), ("gradient", "input 0")} <= {(item.kind, item.name) for item in found.items}


def test_half_precision_and_autocast_have_their_own_tolerances() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(torch.bfloat16)
    found = verify(model, split(model), torch.randn(8, 6, dtype=torch.bfloat16))
    assert found, str(found)
    assert {item.tolerance for item in found.items if item.kind == "output"} == {4e-2}
    model = model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert verify(model, split(model), torch.randn(8, 6))


def test_the_text_says_what_was_compared() -> None:
    model = networks()
    text = str(verify(model, split(model), numbers(10, 6)))
    assert text.startswith("The pipe is the model.")
    assert "largest difference" in text
    assert "take statistics over each microbatch by itself" in text
    assert all(len(line.split()) for line in text.splitlines() if line.startswith(("train", "eval")))


def test_a_pipe_that_is_not_its_model() -> None:
    model = CASES["chain"].build()
    pipe, batch = split(model), CASES["chain"].batch(8)
    first = next(iter(dict(model.named_parameters())))

    class Off:
        def __getattr__(self, name: str) -> Any:
            return getattr(pipe, name)

        def __call__(self, *args: Any) -> Any:
            return pipe(*args) * 1.01

    found = verify(model, Off(), batch.args)
    assert not found
    text = str(found)
    assert text.startswith("The pipe is NOT the model.")
    assert "- train: output 0: 1" in text
    assert f"- eval: gradient {first}: " in text


# -- arguments -----------------------------------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe, value = split(model), torch.randn(8, 6)
    with pytest.raises(InputError, match=r"0.weight is \[7, 6\] here, \[6, 6\] in the pipe"):
        verify(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)), pipe, value)
    with pytest.raises(InputError, match=r"2.weight is \[6, 6\] here, missing in the pipe"):
        verify(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)), pipe, value)
    with pytest.raises(InputError, match=r"0.weight has other values in the pipe"):
        verify(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), pipe, value)
    with pytest.raises(InputError, match=r"give the plain torch.nn.Module"):
        verify(pipe, pipe, value)
    with pytest.raises(InputError, match=r"give what autosplit\(model, ...\) returned"):
        verify(model, model, value)
    with pytest.raises(InputError, match="target= is given without loss_fn="):
        verify(model, pipe, value, target=value)
    with pytest.raises(InputError, match="sample is a list"):
        verify(model, pipe, [value])
