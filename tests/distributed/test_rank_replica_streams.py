"""A stream of stages whose replicas are ranks has the bits of the same stream in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autosplit import autosplit
from tests.distributed import test_rank_streams as streams
from tests.distributed.launching import causes, launch
from tests.distributed.models import TRAININGS
from tests.distributed.processes import Pool, error_of
from tests.distributed.training import Trained, Training, compare
from tests.stream.streams import sgd

LAYOUTS = [
    ([2, 1], "dropout", "stash", "adamw"),
    ([1, 2], "batch norm", "stash", "sgd"),
    ([1, 2], "dropout", "2bw", "adamw"),
]
MORE = [
    ([2, 2], "dropout", "2bw", "adamw"),
    ([2, 2], "batch norm", "2bw", "adamw"),
    ([2, 2], "tied gpt with dropout", "stash", "adamw"),
    ([4], "batch norm", "2bw", "adamw"),
    ([4], "skips", "2bw", "sgd"),
    ([1, 3], "skips", "stash", "adamw"),
    ([3, 1], "tied gpt with dropout", "stash", "adamw"),
    ([2, 1], "ragged", "stash", "adamw"),
    ([1, 2], "relative bias", "stash", "adamw"),
    ([2, 1], "rows that mix", "stash", "adamw"),
    ([2, 1], "recurrent", "2bw", "adamw"),
    ([1, 1, 2], "passthrough", "stash", "adamw"),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("replicas", "name", "staleness", "optimizer"),
    [*LAYOUTS, *(pytest.param(*own, marks=pytest.mark.slow) for own in MORE)],
)
def test_a_stream_has_the_bits_of_one_process(
    ranks: Pool, replicas: list[int], name: str, staleness: str, optimizer: str
) -> None:
    assert ranks(sum(replicas)).run(streams.streamed, name, 9, staleness, optimizer, replicas=replicas)[0] == []


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [2, 2], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("staleness", ["stash", "2bw"])
def test_minibatches_of_fewer_microbatches_than_replicas(ranks: Pool, replicas: list[int], staleness: str) -> None:
    given = "dropout", 12, staleness, "sgd", False, streams.FEW_ROWS
    assert ranks(sum(replicas)).run(streams.streamed, *given, replicas=replicas)[0] == []


def test_a_stream_goes_on_from_a_checkpoint_with_and_without_replicas(ranks: Pool, tmp_path: Path) -> None:
    done, losses = ranks(3).run(streams.saved, str(tmp_path), replicas=[2, 1])[0]
    assert len(losses) >= 2
    assert ranks(3).run(streams.resumed, str(tmp_path), done, replicas=[2, 1])[0] == losses
    assert ranks(3).run(streams.resumed, str(tmp_path), done, replicas=[1, 2])[0][0] == losses[0]
    assert ranks(2).run(streams.resumed, str(tmp_path), done)[0][0] == losses[0]


def failing(replicas: list[int]) -> None:
    """Train on a stream of which one replica's loop raises."""
    training = TRAININGS["dropout"]
    pipe = autosplit(training.make(), devices="torchrun", chunks=4, sample=training.batch(9).args, replicas=replicas)
    items = partial(streams.items_of, replace(training, rows=(9,) * 12))
    for number, _ in enumerate(pipe.train_stream(items(), loss_fn=training.loss, optimizer=sgd)):
        if number == 4 and dist.get_rank() == 1:
            raise OSError("no space left")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2]], ids=str)
def test_a_replica_that_ends_ends_all_ranks(replicas: list[int]) -> None:
    run = launch(failing, 3, replicas, limit_s=60.0)
    assert not run.left, run
    assert all(run.codes)
    assert all("rank 1" in cause for cause in causes(run).values()), run.stderr
    assert "no space left" in run.stderr


def halved(replicas: list[int]) -> list[str]:
    """Train by an optimizer that changes gradients in place, to a round that is not whole."""

    def loop(pipe: Any, training: Training) -> Trained:
        optimizer = sgd(list(pipe.parameters()))

        class Halving(type(optimizer)):  # type: ignore[misc]
            def step(self, *given: Any) -> Any:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.mul_(0.5)
                return super().step(*given)

        optimizer.__class__ = Halving
        given = {"loss_fn": training.loss, "optimizer": optimizer}
        losses = list(pipe.train_stream(streams.items_of(training), **given))
        return losses, []

    return compare(replace(TRAININGS["dropout"], rows=(9, 3) * 4 + (9,)), {"replicas": replicas}, loop)


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2]], ids=str)
def test_an_optimizer_that_changes_its_gradients(ranks: Pool, replicas: list[int]) -> None:
    assert ranks(3).run(halved, replicas)[0] == []


def unlike() -> str:
    """Train on a stream with another learning rate on one replica."""
    training = replace(TRAININGS["dropout"], rows=(9,) * 6)
    pipe = autosplit(training.make(), devices="torchrun", chunks=4, sample=training.batch(9).args, replicas=[2, 1])
    optimizer = sgd(list(pipe.parameters()))
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    return error_of(list, pipe.train_stream(streams.items_of(training), loss_fn=training.loss, optimizer=optimizer))


def test_replicas_with_other_optimizers_end_the_stream(ranks: Pool) -> None:
    for said in ranks(3).run(unlike):
        assert "ranks 0 and 1 are replicas of stage 0, and have different weights after the same minibatches" in said
