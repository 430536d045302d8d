"""Gradients that the engine is given to keep: they become ``.grad`` without a copy, and sums without new memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit import autosplit
from autosplit.backward import apart, donate_gradients
from autosplit.runtime.step import leaves as handed


def leaves(count: int) -> list[torch.Tensor]:
    return [torch.zeros(3, requires_grad=True) for _ in range(count)]


def test_a_gradient_that_is_held_elsewhere_is_copied():
    (leaf,), held = leaves(1), torch.ones(3)
    donate_gradients([leaf], [held]).backward()
    leaf.grad += 1
    assert held.tolist() == [1.0] * 3


def test_one_gradient_for_two_leaves_is_not_shared():
    one, other = leaves(2)
    gradient = torch.ones(3)
    gradients = [gradient, gradient]
    del gradient
    donate_gradients([one, other], gradients).backward()
    one.grad += 1
    assert other.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_a_step_hands_its_sums_over_without_a_copy(monkeypatch, lanes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(6, 4)
    pipe = autosplit(model, devices=["cpu", "cpu"], chunks=3, sample=batch, lanes=lanes)
    places: list[int] = []

    def watched(tensors, gradients):
        places.extend(gradient.data_ptr() for gradient in gradients)
        return donate_gradients(tensors, gradients)

    monkeypatch.setattr(handed, "donate_gradients", watched)
    step(pipe, batch)
    assert sorted(parameter.grad.data_ptr() for parameter in model.parameters()) == sorted(places)


def step(pipe, batch):
    pipe.train_step(batch, target=batch, loss_fn=nn.functional.mse_loss, loss_reduction="mean")


def test_gradients_that_share_memory_are_handed_over_apart() -> None:
    """A batch of one row: the gradient of a class token lies in that of its positions."""
    whole = torch.arange(6.0)
    leaves = [
        torch.zeros(6, requires_grad=True),
        torch.zeros(2, requires_grad=True),
        torch.zeros(3, requires_grad=True),
    ]
    gradients = [whole, whole[1:3], torch.ones(3)]
    alone = gradients[2].data_ptr()
    del whole
    gradients = apart(gradients)
    donate_gradients(leaves, gradients).backward()
    found = [leaf.grad for leaf in leaves]
    assert [gradient.tolist() for gradient in found] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0], [1.0] * 3]
    assert len({gradient.untyped_storage().data_ptr() for gradient in found}) == 3
    assert found[2].data_ptr() == alone
