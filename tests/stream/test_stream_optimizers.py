"""Optimizers in a stream: options, counters and hooks of the caller's do what they do in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.stream.streams import Pair, adamw, expected, run, sgd, stream_of


def test_options_of_the_optimizer_are_those_when_a_minibatch_was_taken(own: Pair, items: list[Any]) -> None:
    optimizer = torch.optim.SGD(own.model.parameters(), lr=0.1)
    rates: list[float] = []

    def loader() -> Iterator[Any]:
        for number, item in enumerate(items):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            rates.append(optimizer.param_groups[0]["lr"])
            yield item

    found = [loss.item() for loss in stream_of(own, loader(), optimizer)]
    steps = iter(rates)
    made: list[torch.optim.SGD] = []

    def scheduled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.1))
        return made[-1]

    def with_rates() -> Iterator[Any]:
        for item in items:
            rate = next(steps)
            for one in made:
                one.param_groups[0]["lr"] = rate
            yield item

    assert found == pytest.approx(expected(own, with_rates(), "stash", scheduled), rel=1e-12)
    own.assert_equal()


def test_frozen_layers_are_trained_when_they_are_unfrozen(own: Pair, items: list[Any]) -> None:
    own.model.blocks[0].requires_grad_(False)
    before = copy.deepcopy(own.model.blocks[0].state_dict())
    stream = stream_of(own, items, sgd(list(own.model.parameters())))
    for number, _ in enumerate(stream):
        if number == 2:
            torch.testing.assert_close(own.model.blocks[0].state_dict(), before, rtol=0, atol=0)
            own.model.blocks[0].requires_grad_(True)
    assert not torch.equal(own.model.blocks[0][0].weight, before["0.weight"])


class Counting(torch.optim.SGD):
    """Counts its steps in its groups and in an attribute, and steps by less each time."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= 0.1 / (group["k"] + self.steps) * parameter.grad


@pytest.mark.parametrize("how", ["one optimizer", "one per stage"])
def test_an_optimizer_that_counts_goes_on_counting(own: Pair, items: list[Any], how: str) -> None:
    optimizer = Counting(own.model.parameters(), lr=0.1)
    made: Any = optimizer if how == "one optimizer" else lambda parameters: Counting(parameters, lr=0.1)
    stream = stream_of(own, items, made)
    found = [next(stream).item() for _ in range(3)]
    stream.drain()
    done = stream.minibatches
    found += [loss.item() for loss in stream]
    counting = lambda parameters: Counting(parameters, lr=0.1)  # noqa: E731
    assert found == pytest.approx(expected(own, items, "stash", counting, drains=[done]), rel=1e-12)
    assert all(own.steps == own.param_groups[0]["k"] == len(items) for own in stream.optimizers)


def test_parameters_that_are_added_to_the_optimizer_are_trained(own: Pair, items: list[Any]) -> None:
    head, *rest = own.model.parameters()
    optimizer = sgd(rest)
    before = head.detach().clone()
    for number, _ in enumerate(stream_of(own, items, optimizer)):
        if number == 2:
            assert torch.equal(head, before)
            optimizer.add_param_group({"params": [head]})
    assert not torch.equal(head, before)


def test_steps_and_zero_grad_of_the_caller_between_losses_do_nothing(own: Pair, items: list[Any]) -> None:
    optimizer = adamw(list(own.model.parameters()))
    twin = own.twin()
    found = []
    for loss in stream_of(own, items, optimizer):
        for _ in range(20):
            optimizer.step()
            optimizer.zero_grad()
            own.model.zero_grad()
        found.append(loss.item())
    assert found == run(twin, items, "stash", adamw)
    torch.testing.assert_close(own.model.state_dict(), twin.model.state_dict(), rtol=0, atol=0)
