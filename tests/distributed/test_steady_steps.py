"""Steps of a kind that all ranks know: they vote, and meet where one has another call; what is refused leaves no trace.

What a rank has instead of a step, after some that were alike, is refused on every rank by the error that a first step
gets, but for values of the batch, which are compared in the first three steps, in every hundredth, and as
``check_inputs=`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed.world import World
from tests.distributed.processes import Pool, error_of
from tests.distributed.test_agreement import batch, model


class Weighted(nn.Module):
    """A loss with a number, which may change, and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mode = 1.0, "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * F.mse_loss(output, target, reduction=self.mode)


def _pipe(**how: Any) -> Any:
    return autosplit(model(), devices="torchrun", chunks=4, sample=batch(), **how)


def _step(pipe: Any, rows: int = 8, **how: Any) -> Tensor:
    given = {"target": batch(rows, 2), "loss_fn": F.mse_loss} | how
    return pipe.train_step(given.pop("x", batch(rows, 1)), **given)


def _other_mode(pipe: Any) -> Any:
    pipe.eval()
    try:
        return _step(pipe)
    finally:
        pipe.train()


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows": (lambda pipe: _step(pipe, rows=4), "the ranks differ in the call"),
    "dtype": (lambda pipe: _step(pipe, x=batch(8, 1).double()), ""),
    "mode": (_other_mode, "the ranks differ in the call"),
    "loss": (lambda pipe: _step(pipe, loss_fn=F.l1_loss), "the ranks differ in the loss"),
    "reduction": (lambda pipe: _step(pipe, loss_fn=Weighted()), "the ranks differ in the loss"),
    "target of other rows": (lambda pipe: _step(pipe, target=batch(4, 2)), "the ranks differ in the target"),
    "no target": (lambda pipe: pipe.train_step(batch(8, 1)), "the ranks differ in the target"),
    "random state": (lambda pipe: (torch.rand(1), _step(pipe)), "the ranks differ in torch's random state"),
    "evaluation": (lambda pipe: pipe.eval_step(batch(8, 1)), "the ranks differ in "),
    "clipping": (lambda pipe: pipe.clip_grad_norm_(1.0), "the ranks make different calls"),
    "bad input": (lambda pipe: pipe.train_step("no tensor", target=batch(8, 2), loss_fn=F.mse_loss), ""),
}


def diverge(name: str, steps: int, culprit: int) -> tuple[str, bool, float, float]:
    """Take steps, then have one rank do another thing, then one more step.

    Returns what is raised, whether gradients are as they were, and the losses of the steps around it with one state of
    the random numbers.
    """
    pipe = _pipe()
    torch.manual_seed(3)
    losses = [_step(pipe) for _ in range(steps)]
    torch.manual_seed(4)
    before = float(_step(pipe))
    torch.manual_seed(4)
    gradients = [parameter.grad.clone() for parameter in pipe.parameters()]
    state = torch.get_rng_state()
    found = error_of(lambda: OTHERS[name][0](pipe) if dist.get_rank() == culprit else _step(pipe))
    torch.set_rng_state(state)
    kept = all(map(torch.equal, gradients, (parameter.grad for parameter in pipe.parameters())))
    after = float(_step(pipe))
    return found, kept and len(losses) == steps, before, after


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_a_rank_that_does_another_thing_is_refused_by_all(ranks: Pool, name: str, culprit: int) -> None:
    one, other = ranks(2).run(diverge, name, 4, culprit)
    assert one == other
    found, kept, before, after = one
    assert OTHERS[name][1] in found
    assert found != "nothing was raised"
    assert kept, "a gradient was changed"
    assert before == after


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 49, 98, 99, 100])
@pytest.mark.parametrize("name", ["rows", "loss", "evaluation"])
def test_it_is_refused_after_any_number_of_steps(ranks: Pool, name: str, steps: int) -> None:
    one, other = ranks(2).run(diverge, name, steps, 1)
    assert one == other
    assert OTHERS[name][1] in one[0]
    assert one[1:] == (True, one[3], one[3])


def meetings(check_inputs: Any, steps: int) -> list[int]:
    """Take steps with values that differ between the ranks, and return the numbers of those that were refused.

    A loss is made anew in every round, as in a loop, and an evaluation stands between.
    """
    pipe, found = _pipe(check_inputs=check_inputs), []

    def step(seed: int) -> None:
        torch.manual_seed(0)
        _step(pipe, x=batch(8, seed), loss_fn=lambda output, target: F.mse_loss(output, target))

    for number in range(steps):
        different = error_of(lambda: step(dist.get_rank()))
        if different != "nothing was raised":
            assert "the batch's values" in different
            found.append(number)
            step(1)
        if number % 3 == 0:
            pipe.eval_step(batch(8, 5))
    return found


@pytest.mark.parametrize(("check_inputs", "steps"), [(None, 7), (True, 4), (2, 6), (False, 4)])
def test_values_are_compared_in_the_steps_that_are_asked_for(ranks: Pool, check_inputs: Any, steps: int) -> None:
    expected = {None: [0, 1, 2], True: [0, 1, 2, 3], 2: [0, 1, 2, 4], False: []}[check_inputs]  # 1: it was proved
    assert ranks(2).run(meetings, check_inputs, steps) == [expected] * 2


@pytest.mark.slow
def test_values_are_compared_in_every_hundredth_step(ranks: Pool) -> None:
    assert ranks(2).run(meetings, None, 103) == [[0, 1, 2, 100]] * 2


def collectives() -> list[list[str]]:
    """Return for what ranks meet in steps and evaluations of kinds that they know."""
    pipe, met = _pipe(), list[str]()
    rows = World._rows

    def counted(self: World, doing: str, value: Any) -> Any:
        met.append(doing)
        return rows(self, doing, value)

    found = []
    for _ in range(5):
        met.clear()
        World._rows = counted  # type: ignore[method-assign]
        try:
            for loss in (F.mse_loss, Weighted(), lambda output, target: (output - target).abs().mean()):
                _step(pipe, loss_fn=loss)
            pipe.eval_step(batch(8, 1))
        finally:
            World._rows = rows  # type: ignore[method-assign]
        found.append(list(met))
    return found


def test_ranks_do_not_meet_in_steps_that_they_know(ranks: Pool) -> None:
    for found in ranks(2).run(collectives):
        assert len(found[0]) >= 4
        assert found[3:] == [[], []]


def numbers_of_a_loss() -> list[float]:
    """Change a number that the loss holds in every step, also where the ranks vote."""
    pipe, loss, found = _pipe(), Weighted(), []
    for step in range(6):
        loss.weight = float(step)
        torch.manual_seed(0)
        found.append(float(_step(pipe, loss_fn=loss)))
    return found


def test_a_loss_uses_the_number_that_it_holds_now(ranks: Pool) -> None:
    for found in ranks(2).run(numbers_of_a_loss):
        assert found == pytest.approx([found[1] * step for step in range(6)])


def other_attribute() -> list[str]:
    """Change what a loss is by an attribute, on rank 1 alone and on all ranks."""
    pipe, loss, found = _pipe(), Weighted(), []
    for mode, everywhere in (("mean", True), ("sum", False), ("sum", True), ("mean", False), ("mean", True)):
        for _ in range(4):
            if everywhere or dist.get_rank():
                loss.mode = mode
            torch.manual_seed(0)
            found.append(error_of(lambda: _step(pipe, loss_fn=loss)))
    return found


def test_an_attribute_of_a_loss_that_differs_iserror_of(ranks: Pool) -> None:
    one, other = ranks(2).run(other_attribute)
    assert one == other
    refused = ["the ranks differ in the loss" in text for text in one]
    assert refused == [4 < n <= 8 or 12 < n <= 16 for n in range(1, 21)], one
