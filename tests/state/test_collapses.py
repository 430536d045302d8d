"""A pipe that hardly is one says so at the first call of each kind, with the cause and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit

pytestmark = pytest.mark.filterwarnings("error")


class Mixes(nn.Module):
    """Ranks rows between two layers: all that follows sees the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.before(value)
        return self.after(value - value.cumsum(0))


class Counts(nn.Module):
    """Draws by a number of torch's seed: no graph can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return self.layers(value)


def split(model: nn.Module, **options: Any) -> Any:
    return autosplit(model, **({"devices": 2, "chunks": 2} | options))


def test_work_on_the_whole_batch_is_a_warning_once_per_kind_of_call() -> None:
    pipe, value = split(Mixes()), torch.ones(6, 8)
    message = (
        r"The pipeline of Mixes has collapsed: \d\d% of the work runs once per step, on the whole batch, from the root "
        r"\(cumsum, .*test_collapses.py:\d+\) on. By module: after.0 \d\d%, after.1 \d\d%, .* loss_fn of train_step"
    )
    with pytest.warns(UserWarning, match=message) as seen:
        pipe(value)
    pipe(value)
    pipe(torch.ones(5, 8))
    assert str(seen[0].message) in pipe.report()
    with pytest.warns(UserWarning, match="has collapsed"):
        pipe.eval_step(value)


def test_a_batch_that_cannot_be_cut_is_a_warning() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    with pytest.warns(
        UserWarning, match="batch of 3 rows is one microbatch, .* model needs 2 rows in each: give a larg"
    ):
        split(model)(torch.randn(3, 8))
    with pytest.warns(UserWarning, match="batch of 1 row is one microbatch"):
        split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))(torch.randn(1, 8))


def normed(*, kept: bool = True) -> nn.Module:
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=kept), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.BatchNorm1d(8, track_running_stats=kept), nn.Linear(8, 8))


def test_batch_norms_that_see_microbatches_unasked_are_a_warning_at_the_first_training_call() -> None:
    value = torch.randn(7, 8)
    message = (
        r"2 batch norm layers of Sequential \(1, 4\) normalise each microbatch \(4 of 7 rows\) by itself: outputs, "
        r"loss and gradients are not the plain model's. batch_norm='full' .* runs 70% of the work on the whole batch"
    )
    pipe = split(normed(), sample=value)
    pipe.eval()(value)
    with pytest.warns(UserWarning, match=message):
        pipe.train()(value)
    pipe(value)
    pipe.train_step(value, target=value, loss_fn=nn.functional.mse_loss)
    with pytest.warns(UserWarning, match=message):
        split(normed(), devices=1).train_step(value, target=value, loss_fn=nn.functional.mse_loss)


def test_a_model_by_its_own_python_is_a_warning() -> None:
    pipe = split(Counts())
    with pytest.warns(
        UserWarning, match=r"has collapsed: its own Python runs, .* since forward sets torch's random seed"
    ):
        pipe(torch.ones(6, 8))
    pipe(torch.ones(6, 8))
