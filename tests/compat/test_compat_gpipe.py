from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autosplit.compat import GPipe
from autosplit.compat.chain import CHECKPOINTS
from tests.compat.sequential_models import assert_like_plain, mlp, pairs, rows, unet

CPUS = ["cpu"] * 3


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
