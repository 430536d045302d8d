"""GPipe beside torchgpipe: the plain model's numbers, its cuts, balances and skips."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autosplit.compat import GPipe, balance_by_size, balance_by_time, pop, skippable, stash
from autosplit.compat import balance as balancing
from autosplit.compat.chain import CHECKPOINTS
from autosplit.compat.skip import on_their_own
from tests.compat.sequential_models import assert_like_plain, mlp, pairs, rows, unet

CPUS = ["cpu"] * 5


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("count", [1, 5, 8, 9])
def test_outputs_and_gradients_are_the_plain_model_s(checkpoint, count):
    model = mlp()
    pipe = GPipe(copy.deepcopy(model), [2, 1, 2], devices=CPUS, chunks=4, checkpoint=checkpoint)
    assert_like_plain(pipe, model, rows(count, 4))


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_tuples_go_from_partition_to_partition(balance):
    model = pairs()
    assert_like_plain(GPipe(copy.deepcopy(model), balance, devices=CPUS, chunks=3), model, rows(7, 4))


def test_a_tuple_may_be_the_input():
    model = nn.Sequential(*pairs()[1:])
    pipe = GPipe(model, [1, 1], devices=CPUS, chunks=2)
    x, y = rows(5, 4), rows(5, 4)
    assert [torch.equal(*both) for both in zip(pipe((x, y)), model((x, y)), strict=True)] == [True, True]


@pytest.mark.parametrize(("count", "sizes"), [(8, (2, 2, 2, 2)), (9, (3, 3, 3)), (5, (2, 2, 1)), (3, (1, 1, 1))])
def test_microbatches_have_the_sizes_of_chunk(count, sizes):
    pipe = GPipe(mlp(), [3, 2], devices=CPUS, chunks=4)
    x = rows(count, 4)
    pipe(x)
    assert pipe.pipe.plan.microbatch_rows == sizes == tuple(len(part) for part in x.chunk(4))


def test_the_balance_is_the_cut():
    pipe = GPipe(mlp(), (2, 1, 2), devices=CPUS, chunks=2)
    pipe(rows(4, 4))
    layers = [{name.split("#")[0] for name in stage.nodes} for stage in pipe.pipe.plan.stages]
    assert layers == [{"partitions.0.0", "partitions.0.1"}, {"partitions.1.2"}, {"partitions.2.3", "partitions.2.4"}]
    assert "at most" in pipe.pipe.report()


class Pass(nn.Module):
    def forward(self, x):
        return x


class Word(nn.Module):
    def forward(self, x):
        return x, "word"


def test_only_tensors_go_from_partition_to_partition_and_out():
    for model in (nn.Sequential(Word()), nn.Sequential(Word(), nn.Flatten())):
        with pytest.raises(TypeError, match="expected Tensor, but got str"):
            GPipe(model, [1] * len(model), devices=CPUS)(torch.rand(2, 2))


def test_modes_and_hooks_are_the_layers():
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), [1, 2], devices=CPUS, chunks=2)
    x = torch.rand(6, 4)
    assert not torch.equal(pipe(x), pipe(x))
    assert torch.equal(pipe.eval()(x), pipe(x))
    seen = []
    pipe.partitions[1].register_forward_hook(lambda module, inputs, output: seen.append((len(output), output.grad_fn)))
    with torch.no_grad():
        pipe(x)
    assert [entry for entry in seen if entry[0] == 3][-2:] == [(3, None), (3, None)]


def test_copies_run_by_themselves():
    model = unet()
    pipe = GPipe(model, [2, 1, 2], devices=CPUS, chunks=2)
    x = rows(4, 2, 5)
    before = pipe(x)
    twin = copy.deepcopy(pipe)
    with torch.no_grad():
        twin[2].weight.zero_()
    assert torch.equal(pipe(x), before)
    assert not torch.equal(twin(x), before)
    assert twin.pipe.plan == pipe.pipe.plan


def test_the_pipe_below_trains_in_one_call():
    model = mlp()
    pipe = GPipe(copy.deepcopy(model), [2, 3], devices=CPUS, chunks=4)
    x, target = rows(9, 4), rows(9, 2).detach()
    loss = pipe.pipe.train_step(x, target=target, loss_fn=nn.MSELoss())
    plain = nn.functional.mse_loss(model(x.detach()), target)
    plain.backward()
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-12, atol=1e-12)
    for own, other in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_model_that_no_graph_follows_runs_without_recomputing():
    pipe = GPipe(nn.Sequential(Pass(), Pass()), [1, 1], devices=CPUS, chunks=2)
    x = torch.rand(4, 2)
    assert torch.equal(pipe(x), x)
    assert "recompute=['except_last'] is ignored" in str(pipe.pipe.plan.notes)


def norms():
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3, momentum=None)).double()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_batch_norms_count_every_microbatch(checkpoint):
    model = norms()
    pipe = GPipe(copy.deepcopy(model), [1, 3], devices=CPUS, chunks=4, checkpoint=checkpoint)
    x = rows(9, 2, 5)
    for _ in range(2):
        outputs = torch.cat([model(part) for part in x.chunk(4)])
        own = pipe(x)
        own.sum().backward()
        torch.testing.assert_close(own, outputs, rtol=1e-12, atol=1e-12)
    for (name, buffer), other in zip(pipe.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-12, atol=1e-12, msg=name)
    assert pipe[1].num_batches_tracked == 6


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_deferred_batch_norms_count_every_batch(checkpoint):
    model = norms()
    options = {"chunks": 4, "checkpoint": checkpoint, "deferred_batch_norm": True}
    pipe = GPipe(copy.deepcopy(model), [1, 3], devices=CPUS, **options)
    x = rows(9, 2, 5)
    for _ in range(2):
        model(x)
        pipe(x).sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(pipe[1], name), getattr(model[1], name), rtol=1e-12, atol=1e-12)
    assert pipe[3].num_batches_tracked == 2


def test_random_numbers_are_the_plain_model_s():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)).double()
    pipe = GPipe(copy.deepcopy(model), [2, 2], devices=CPUS, chunks=3)
    x = rows(7, 4)
    results = []
    for run in (model, pipe):
        torch.manual_seed(7)
        results.append(run(x))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


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


class Costly(nn.Module):
    """Takes as many seconds of a clock that the test keeps as it is told, and counts its calls."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.norm = nn.BatchNorm1d(1)

    def __deepcopy__(self, memo):
        return Costly(self.clock, self.seconds)

    def forward(self, x):
        assert self.training
        self.clock[0] += self.seconds
        return self.norm(x)


class Grows(nn.Module):
    """Keeps as many tensors like its input as it is told."""

    def __init__(self, times, width=1):
        super().__init__()
        self.times = times
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        for _ in range(self.times):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


@pytest.mark.parametrize(
    ("seconds", "partitions", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([6, 5, 4, 3, 2, 1], 3, [1, 2, 3]),
        ([1, 1, 1, 1], 4, [1, 1, 1, 1]),
    ],
)
def test_the_slowest_partition_is_the_least(monkeypatch, seconds, partitions, expected):
    clock = [0.0]
    monkeypatch.setattr(balancing, "_now", lambda place: clock[0])
    model = nn.Sequential(*[Costly(clock, second) for second in seconds]).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample, state = torch.rand(3, 1), torch.get_rng_state()
    assert balance_by_time(partitions, model, sample, timeout=0.01, device="cpu") == expected
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_count_by_their_scale():
    model = nn.Sequential(*[Grows(3 - place, width=30 * (place + 1)) for place in range(3)])
    sample = torch.rand(10, 100)
    assert balance_by_size(2, model, sample, param_scale=0.0, device="cpu") == [1, 2]
    assert balance_by_size(2, model, sample, param_scale=4.0, device="cpu") == [2, 1]


def test_gradients_that_are_there_are_not_lost():
    model = nn.Sequential(nn.Linear(2, 2))
    model(torch.rand(3, 2)).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(1, model, torch.rand(3, 2), device="cpu")
