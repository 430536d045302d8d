from __future__ import annotations

import copy

import pytest
from torch import nn

from autosplit.compat import GPipe, pop, skippable, stash
from autosplit.compat.chain import CHECKPOINTS
from autosplit.compat.skip import on_their_own
from tests.compat.sequential_models import assert_like_plain, rows, unet

CPUS = ["cpu"] * 5


class Pass(nn.Module):
    def forward(self, x):
        return x


def layer(*, stashes=(), pops=()):
    return skippable(stash=stashes, pop=pops)(Pass)()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("balance", [[5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]])
def test_skips_cross_partitions(balance, checkpoint):
    model = unet()
    pipe = GPipe(copy.deepcopy(model), balance, devices=CPUS, chunks=3, checkpoint=checkpoint)
    with on_their_own():
        assert_like_plain(pipe, model, rows(7, 2, 5))


def test_a_skip_goes_directly_to_the_stage_that_pops_it():
    pipe = GPipe(unet(), [1, 1, 1, 1, 1], devices=CPUS, chunks=2)
    pipe(rows(4, 2, 5))
    sent = {(b.producer, b.consumers) for b in pipe.pipe.plan.boundaries if b.producer != -1}
    assert sent == {(0, (1, 3)), (1, (2,)), (2, (3,)), (3, (4,))}
    assert [b.consumers for b in pipe.pipe.plan.boundaries if b.producer == -1] == [(0, 4)]


def test_a_layer_that_reads_values_keeps_its_skips_by_microbatch():
    @skippable(stash=["largest"])
    class Reads(nn.Module):
        def forward(self, x):
            yield stash("largest", x * float(x.detach().abs().amax(1).sum().item() >= 0))
            return x + 1

    @skippable(pop=["largest"])
    class Adds(nn.Module):
        def forward(self, x):
            return x * (yield pop("largest"))

    model = nn.Sequential(Reads(), nn.Linear(3, 3), Adds()).double()
    with on_their_own():
        assert_like_plain(GPipe(copy.deepcopy(model), [1, 1, 1], devices=CPUS, chunks=3), model, rows(6, 3))


def test_a_skippable_layer_shows_what_it_is():
    assert repr(layer()) == "@skippable(Pass())"
