"""What goes wrong in a stream: clear words, the losses before it, and weights of which it is known what they are."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import InputError
from tests.stream.streams import Pair, Skipping, cross_entropy, expected, pair, sgd


def check_earlier(own: Pair, items: list[Any], found: list[float], done: int) -> None:
    """Compare with a reference that ends before the minibatch that failed."""
    assert len(found) == done
    assert found == pytest.approx(expected(own, items[:done], "stash", sgd), rel=1e-12)
    own.assert_equal()


def losses_until(stream: Iterable[Any]) -> tuple[list[float], BaseException]:
    """Return the losses before an error, and the error."""
    found: list[float] = []
    try:
        for loss in stream:
            found.append(loss.item())
    except Exception as error:
        return found, error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("lanes", "replicas"), [("threads", None), ("inline", None), ("threads", [2, 1, 1])])
@pytest.mark.parametrize("where", ["loss", "loader", "inputs", "rows"])
@pytest.mark.parametrize("at", [0, 1, 6, 7])
def test_what_raises_before_a_backward_leaves_what_came_earlier(
    items: list[Any], where: str, at: int, lanes: str, replicas: list[int] | None
) -> None:
    own = pair(Skipping, items[0][0], lanes=lanes, replicas=replicas)
    own.find_stages(items[0])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss" and (target == -1).all():
            raise ValueError("no target")
        return cross_entropy(output, target)

    def loader() -> Iterator[Any]:
        for number, (tokens, target) in enumerate(items):
            if number != at:
                yield tokens, target
            elif where == "loader":
                raise ValueError("no minibatch")
            elif where == "loss":
                yield tokens, torch.full_like(target, -1)
            elif where == "inputs":
                yield tokens + 100, target
            else:
                yield tokens, target[:2]

    stream = own.pipe.train_stream(loader(), loss_fn=loss, optimizer=sgd)
    found, error = losses_until(stream)
    assert stream.minibatches == at
    assert isinstance(error, (ValueError, IndexError))
    if where != "loader":
        assert f"all stages are as after {at} minibatches" in "".join(error.__notes__)
    check_earlier(own, items, found, at)
    next_losses = list(own.pipe.train_stream(items[:3], loss_fn=cross_entropy, optimizer=sgd))
    assert len(next_losses) == 3


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_an_error_in_a_backward_says_which_stages_have_stepped(items: list[Any], where: str, at: int) -> None:
    own = pair(Skipping, items[0][0])
    optimizer = sgd(list(own.model.parameters()))
    calls: list[int] = []

    def raises(*_: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise ValueError("no step")

    if where == "backward":
        own.model.blocks[2][0].weight.register_hook(raises)
    else:
        optimizer.register_step_pre_hook(raises)
    _, error = losses_until(own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=optimizer))
    assert isinstance(error, ValueError)
    assert "stages have stepped [" in "".join(error.__notes__)


def test_bad_arguments(items: list[Any]) -> None:
    own = pair(Skipping, items[0][0])
    parameters = list(own.model.parameters())
    patched = sgd(parameters)
    patched.step = lambda: None  # type: ignore[method-assign]
    for how, words_of in (
        ({"staleness": "stale"}, "staleness"),
        ({"optimizer": torch.optim.LBFGS(parameters)}, "LBFGS calls the model itself"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)}, r"shape \[2\] that is not the model's"),
        ({"optimizer": patched}, "was replaced on the object"),
        ({"optimizer": 3}, "optimizer= is a torch.optim.Optimizer"),
    ):
        with pytest.raises(InputError, match=words_of):
            own.pipe.train_stream(items, **{"loss_fn": cross_entropy, "optimizer": sgd, **how})


def refused(own: Pair, items: Any, match: str, loss_fn: Any = cross_entropy, **how: Any) -> None:
    """Check that a stream is refused at its first minibatch, and that the model is as it was."""
    before = copy.deepcopy(own.model.state_dict())
    with pytest.raises(Exception, match=match):
        next(own.pipe.train_stream(items, loss_fn=loss_fn, **{"optimizer": sgd, **how}))
    torch.testing.assert_close(own.model.state_dict(), before, rtol=0, atol=0)


def test_what_a_stream_cannot_train(items: list[Any]) -> None:
    own = pair(Skipping, items[0][0])
    refused(own, [items[0][0]], "an item is \\(inputs, target\\)")
    refused(own, [(items[0][0], None)], "there is no target=")
    refused(own, items, "that makes one for a list of parameters, not a int", optimizer=lambda parameters: 3)
    weight = torch.ones((), requires_grad=True)
    refused(
        own, items, "the loss uses a tensor of shape", lambda output, target: cross_entropy(output, target) * weight
    )
    penalty = own.model.table.weight
    refused(
        own,
        items,
        "the loss uses a tensor",
        lambda output, target: cross_entropy(output, target) + penalty.square().sum(),
    )
    own.model.table.weight.grad = torch.zeros_like(own.model.table.weight)
    refused(own, items, "has a gradient")


def test_a_loss_of_the_whole_minibatch_is_refused_where_it_is_cut() -> None:
    items = [(torch.randn(4, 6, dtype=torch.float64), torch.zeros(4)) for _ in range(5)]

    def contrast(output: Tensor, target: Tensor) -> Tensor:
        return (output @ output.T).logsumexp(0).mean()

    own = pair(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), items[0][0])
    assert len(list(own.pipe.train_stream(items, loss_fn=contrast, optimizer=sgd))) == 5
    refused(own, items, "neither a mean nor a sum over rows", contrast, staleness="2bw")


@pytest.mark.parametrize("where", ["loss", "hook"])
def test_the_models_state_is_not_asked_for_in_a_lane(items: list[Any], where: str) -> None:
    own = pair(Skipping, items[0][0])
    optimizer = sgd(list(own.model.parameters()))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            own.model.state_dict()
        return cross_entropy(output, target)

    if where == "hook":
        optimizer.register_step_post_hook(lambda *_: own.model.state_dict())
    _, error = losses_until(own.pipe.train_stream(items, loss_fn=loss, optimizer=optimizer))
    assert "ask between two losses" in str(error)


def test_random_numbers_that_lanes_would_draw(items: list[Any]) -> None:
    own = pair(lambda: Skipping(dropout=0.3), items[0][0], rng="counter")
    refused(own, items, "lanes draw while the loader does")

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output + torch.randn_like(output), target)

    refused(pair(Skipping, items[0][0]), items, "the loss draws random numbers", noisy)


def test_two_parameters_of_one_memory(items: list[Any]) -> None:
    own = pair(Skipping, items[0][0])
    own.model.blocks[1][0].weight.data = own.model.blocks[0][0].weight.data
    refused(own, items, "are two parameters of one memory")


def test_a_model_that_counts_its_calls_is_refused(items: list[Any]) -> None:
    class Counting(Skipping):
        calls = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(tokens) * 1.0

    own = pair(Counting, items[0][0])
    refused(own, items, "changes Python state")


def test_a_parameter_that_is_read_past_the_module_that_runs(items: list[Any]) -> None:
    class Patched(Skipping):
        def __init__(self) -> None:
            super().__init__()
            layer = self.blocks[3][0]
            layer.register_forward_hook(lambda own, given, made: made + layer.weight.sum())

    refused(pair(Patched, items[0][0]), items, "does not read from the module that it is called with")


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_a_parameter_that_is_changed_in_the_middle(items: list[Any], lanes: str) -> None:
    """Which minibatches see it is a race, so it needs a drain; a hook of the optimizer's step is no race."""
    own = pair(Skipping, items[0][0], lanes=lanes)
    weight = own.model.get_parameter("blocks.0.0.weight")

    def clipped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = sgd(parameters)
        made.register_step_post_hook(lambda *_: [_clip(each) for each in parameters])
        return made

    stream = own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=clipped)
    next(stream)
    stream.drain()
    _clip(weight)
    for _ in range(stream.minibatches):  # those that were drained but one, and one that is filled in behind them
        next(stream)
    # time and again: a change while the optimizer steps is taken for one by its hooks
    _, error = losses_until((loss, _clip(weight))[0] for loss in stream)
    assert isinstance(error, InputError)
    assert "'blocks.0.0.weight' was changed in place while minibatches" in str(error)
    assert "stages have stepped" in error.__notes__[-1]


@torch.no_grad()
def _clip(parameter: Tensor) -> None:
    parameter.clamp_(-0.1, 0.1)
