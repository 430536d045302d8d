"""A stream over several processes has the bits of the same stream in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autosplit import autosplit
from autosplit.distributed import checkpoint
from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.schedule.stream import STALENESS
from tests.distributed import dying
from tests.distributed.launching import causes, launch
from tests.distributed.models import DEAR, TRAININGS, next_token, tokens
from tests.distributed.processes import Pool
from tests.distributed.training import Trained, Training, compare, without_gradients
from tests.stream.streams import adamw, sgd

MAKES = {"sgd": sgd, "adamw": adamw}


def items_of(training: Training) -> Iterator[Any]:
    for number, rows in enumerate(training.rows):
        batch = without_gradients(training.batch(rows))
        inputs = Sample(*batch.args, **batch.kwargs)
        yield inputs if training.loss is None else (inputs, training.target(batch, number))


def stream(pipe: Any, training: Training, staleness: str, make: str, whole: bool) -> Trained:
    """Train a pipe on a stream, with an optimizer per stage or one for the whole rank."""
    optimizer: Any = MAKES[make](list(pipe.parameters())) if whole else MAKES[make]
    torch.manual_seed(5)
    losses = list(
        pipe.train_stream(items_of(training), loss_fn=training.loss, optimizer=optimizer, staleness=staleness)
    )
    batch = without_gradients(training.batch(training.rows[0]))
    return losses, [pipe.eval_step(*batch.args, **batch.kwargs)]


def streamed(
    name: str,
    minibatches: int,
    staleness: str,
    make: str = "sgd",
    whole: bool = False,
    rows: Sequence[int] = (),
    **options: Any,
) -> list[str]:
    """Compare a stream of one of the trainings; called in every process."""
    training = TRAININGS[name]
    training = replace(training, rows=tuple(islice(cycle(rows or training.rows), minibatches)))
    return compare(training, options, partial(stream, staleness=staleness, make=make, whole=whole))


@pytest.mark.quick
@pytest.mark.parametrize("staleness", STALENESS)
def test_a_stream_has_the_bits_of_one_process(ranks: Pool, staleness: str) -> None:
    assert ranks(3).run(streamed, "dropout", 9, staleness, "adamw", staleness == "stash")[0] == []


@pytest.mark.parametrize("name", [name for name in TRAININGS if name not in DEAR])
def test_other_models(ranks: Pool, name: str) -> None:
    assert ranks(2).run(streamed, name, 7, "stash")[0] == []


FEW_ROWS = (9, 1, 1, 1, 9, 2, 1, 1, 3, 1, 9, 1)


@pytest.mark.quick
def test_minibatches_that_are_cut_into_few_microbatches(ranks: Pool) -> None:
    assert ranks(3).run(streamed, "dropout", 12, "2bw", "sgd", False, FEW_ROWS)[0] == []


def interrupted(**options: Any) -> list[str]:
    """Train on a stream with what a loop does beside it; return where that is not the same in one process."""

    def loop(pipe: Any, training: Training) -> Trained:
        optimizer = adamw(list(pipe.parameters()))
        given = {"loss_fn": training.loss, "optimizer": optimizer}
        first = pipe.train_stream(items_of(training), **given)
        losses = []
        for _ in range(3):
            losses.append(next(first))
            if getattr(pipe, "_world", None) is not None:
                dist.barrier()  # a loop may wait for all ranks
        pipe.state_dict()  # the same on all ranks, it drains
        losses += [next(first)]
        optimizer.param_groups[0]["lr"] /= 2
        losses += list(first)
        batch = without_gradients(training.batch(9))
        pipe.zero_grad()
        losses.append(pipe.train_step(*batch.args, target=training.target(batch, 0), loss_fn=training.loss))
        optimizer.step()
        pipe.zero_grad()
        second = pipe.train_stream(items_of(training), staleness="2bw", **given)
        losses += [next(second), next(second)]
        third = pipe.train_stream(items_of(training), **given)
        losses += [next(third), next(second), next(third)]
        second.close()
        third.close()
        return losses, [pipe.eval_step(*batch.args, **batch.kwargs)]

    training = TRAININGS["dropout"]
    return compare(replace(training, rows=(9, 9, 7, 9, 9, 9, 9)), options, loop)


@pytest.mark.quick
def test_what_a_loop_does_beside_a_stream(ranks: Pool) -> None:
    assert ranks(2).run(interrupted)[0] == []


def met(minibatches: int, **options: Any) -> int:
    """Train on a stream whose loop waits for all ranks after every loss; return how many losses there were."""
    training = replace(TRAININGS["dropout"], rows=(9,) * minibatches)
    pipe = autosplit(training.make(), devices="torchrun", chunks=4, sample=training.batch(9).args, **options)
    number = 0
    for _ in pipe.train_stream(items_of(training), loss_fn=training.loss, optimizer=sgd):
        dist.barrier()
        number += 1
    return number


@pytest.mark.quick
@pytest.mark.parametrize("minibatches", [1, 8])
def test_a_loop_that_waits_for_all_ranks_to_the_end(ranks: Pool, minibatches: int) -> None:
    assert ranks(3).run(met, minibatches) == [minibatches] * 3


def _saving(devices: Any, **options: Any) -> tuple[Training, Any, torch.optim.Optimizer]:
    training = replace(TRAININGS["dropout"], rows=(9, 9, 7, 9, 9, 9, 7, 9, 9, 9, 7))
    pipe = autosplit(training.make(), devices=devices, chunks=4, sample=training.batch(9).args, **options)
    return training, pipe, adamw(list(pipe.parameters()))


def saved(folder: str, **options: Any) -> tuple[int, list[float]]:
    """Save in the middle of a stream; return how many minibatches came before, and the losses of what follows."""
    training, pipe, optimizer = _saving("torchrun", **options)
    stream = pipe.train_stream(items_of(training), loss_fn=training.loss, optimizer=optimizer)
    before = [next(stream) for _ in range(3)]
    stream.drain()
    checkpoint.save(folder, stream.minibatches, pipe, optimizer)
    torch.manual_seed(6)
    done = stream.minibatches
    return done, [loss.item() for loss in stream][done - len(before) :]


def resumed(folder: str, done: int, devices: Any = "torchrun", **options: Any) -> list[float]:
    """Go on with what was saved; return the losses."""
    training, pipe, optimizer = _saving(devices, **options)
    checkpoint.restore(folder, pipe, optimizer)
    torch.manual_seed(6)
    items = islice(items_of(training), done, None)
    return [loss.item() for loss in pipe.train_stream(items, loss_fn=training.loss, optimizer=optimizer)]


def test_a_stream_goes_on_from_a_checkpoint_on_as_many_or_other_ranks(ranks: Pool, tmp_path: Path) -> None:
    done, losses = ranks(3).run(saved, str(tmp_path))[0]
    assert len(losses) >= 2
    assert resumed(str(tmp_path), done, 3) == losses
    assert ranks(2).run(resumed, str(tmp_path), done)[0][0] == losses[0]


def failed_loaders() -> list[str]:
    """Say how streams end whose loaders raise on all ranks, and what a rank of part of a batch is refused with."""
    training, said = TRAININGS["dropout"], []
    pipe = autosplit(training.make(), devices="torchrun", chunks=4, sample=training.batch(9).args)
    given = {"loss_fn": training.loss, "optimizer": sgd}

    def loader() -> Iterator[Any]:
        yield from islice(items_of(training), 3)
        raise OSError("no such file")

    stream = pipe.train_stream(loader(), **given)
    losses = [next(stream) for _ in range(3)]
    try:
        next(stream)
    except OSError as error:
        said += [str(error), str(stream.minibatches)]
    batch = without_gradients(training.batch(9))
    pipe.zero_grad()
    losses.append(pipe.train_step(*batch.args, target=training.target(batch, 0), loss_fn=training.loss))
    assert all(loss.isfinite() for loss in losses)
    pipe.zero_grad()
    alone = autosplit(training.make(), devices="torchrun", chunks=4, sample=batch.args, feed="first_last")
    for of, how in ((alone, {}), (pipe, {"loss_fn": lambda o, t: (o - t).square().mean(), "staleness": "2bw"})):
        with pytest.raises(InputError) as refused:
            next(of.train_stream(items_of(training), **{**given, **how}))
        said.append(str(refused.value))
    return said


def test_what_is_refused_on_all_ranks(ranks: Pool) -> None:
    for raised, done, feed, loss in ranks(2).run(failed_loaders):
        assert (raised, done) == ("no such file", "3")
        assert "make the pipe with feed='all'" in feed
        assert "give one of torch's losses, or the model's own" in loss


def apart(fault: str) -> None:
    """Train on a stream of which the last rank has other minibatches, or fewer."""
    pipe = autosplit(dying.Tied(), devices="torchrun", chunks=4, sample=tokens(8).args)
    (given,) = tokens(8).args
    items = [((given,), given)] * 6
    if dist.get_rank() == 1:
        items[4:] = [((given.flip(0),), given)] * 2 if fault == "others" else []
    list(pipe.train_stream(items, loss_fn=next_token, optimizer=sgd))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [("others", "rank 1 raised InputError: .*every rank takes the same minibatches"), ("fewer", "wait for each other")],
)
def test_loaders_that_differ_end_all_ranks(fault: str, cause: str) -> None:
    run = launch(apart, 2, fault, limit_s=60.0)
    assert not run.left, run
    assert all(run.codes)
    assert re.search(cause, causes(run)[0]), run.stderr
