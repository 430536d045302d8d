"""BatchNorm in a pipeline normalises by microbatch and counts once per step, over all that a layer saw.

The reference runs the plain model on one microbatch after the other, so that each is normalised by itself, and keeps
every norm's inputs. Then running statistics move once per call of the norm, by the mean and the unbiased variance of
all inputs that the call saw.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit, verify
from tests.equivalence.equality import (
    LANES,
    Batch,
    Run,
    assert_equal_runs,
    difference,
    forward_backward,
    train_step,
)
from tests.models.named import numbers
from tests.models.three_layers import WIDTH, Model
from tests.pairwise import in_turn
from tests.runtime.test_batch_norm_statistics import NormAct

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class OwnNorm(nn.Module):
    """A user's norm: ``F.batch_norm`` with running statistics of its own, and an activation behind."""

    def __init__(self, width: int, momentum: float = 0.2) -> None:
        super().__init__()
        self.scale, self.shift, self.momentum = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
            momentum,
        )
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        statistics: Any = {"running_mean": self.running_mean, "running_var": self.running_var}
        value = F.batch_norm(value, **statistics, weight=self.scale, training=self.training, momentum=self.momentum)
        return F.silu(value + self.shift)


NORMS = (nn.modules.batchnorm._NormBase, OwnNorm)


class ByMicrobatch(nn.Module):
    """A model with one batch as input and output, whose norms see a microbatch at a time."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        super().__init__()
        self.model, self.parts = model, parts

    def forward(self, value: Tensor) -> Tensor:
        norms = [m for m in self.model.modules() if isinstance(m, NORMS) and m.training and m.running_mean is not None]
        seen: dict[int, list[list[Tensor]]] = defaultdict(list)
        before = [(m, m._buffers) for m in norms]
        for norm in norms:
            norm._buffers = {name: buffer.clone() for name, buffer in norm._buffers.items()}
        outputs = []
        for part in value.tensor_split(self.parts):
            uses: dict[int, list[Tensor]] = defaultdict(list)
            hooks = [m.register_forward_pre_hook(lambda m, x, u=uses: u[id(m)].append(x[0].detach())) for m in norms]
            outputs.append(self.model(part))
            for hook in hooks:
                hook.remove()
            for module, inputs in uses.items():
                seen[module].append(inputs)
        for norm, buffers in before:
            norm._buffers = buffers
            for inputs_of_use in zip(*seen[id(norm)], strict=True):
                count_once(norm, list(inputs_of_use))
        return torch.cat(outputs)


def count_once(norm: Any, inputs: list[Tensor]) -> None:
    """Move running statistics by all inputs of one call of a norm."""
    value = torch.cat(inputs).double()
    mean, var = _instances(value) if isinstance(norm, nn.modules.instancenorm._InstanceNorm) else _batch(value)
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        norm.num_batches_tracked += 1
    weight = 1 / int(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.copy_((1 - weight) * norm.running_mean + weight * mean)
    norm.running_var.copy_((1 - weight) * norm.running_var + weight * var)


def _batch(value: Tensor) -> tuple[Tensor, Tensor]:
    over = [dim for dim in range(value.dim()) if dim != 1]
    return value.mean(over), value.var(over)


def _instances(value: Tensor) -> tuple[Tensor, Tensor]:
    return value.flatten(2).mean(2).mean(0), value.flatten(2).var(2).mean(0)


def run_by_microbatch(model: nn.Module, batch: Batch, *, parts: int, loss: Any = None) -> Run:
    """Run the reference."""
    whole = ByMicrobatch(model, parts)
    run = forward_backward(whole, batch) if loss is None else forward_backward(whole, batch, loss=loss)
    gradients = {name.removeprefix("model."): gradient for name, gradient in run.gradients.items()}
    buffers = {name.removeprefix("model."): buffer for name, buffer in run.buffers.items()}
    return Run(run.outputs, run.loss, gradients, buffers)


# No bias stands before a BatchNorm: its gradient is zero but for rounding, which no relative metric can compare.
def dense() -> nn.Module:
    layers = [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 6))


def cumulative() -> nn.Module:
    layers = [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6, momentum=None, affine=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6))


def untracked() -> nn.Module:
    layers = [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6))


def convolution() -> nn.Module:
    layers = [nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())


def activated() -> nn.Module:
    layers = [nn.Linear(6, 6, bias=False), NormAct(6), nn.Linear(6, 6, bias=False), OwnNorm(6)]
    return nn.Sequential(*layers, nn.Linear(6, 6, bias=False), NormAct(6, momentum=None), nn.Linear(6, 6))


BUILD = {
    "dense": dense,
    "cumulative": cumulative,
    "untracked": untracked,
    "convolution": convolution,
    "activated": activated,
}
MODELS = ("dense", "cumulative", "convolution", "activated")


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return BUILD[name]().double()


def batch_of(name: str, rows: int, *, seed: int = 0) -> Batch:
    value = numbers(rows, 6, seed=seed).detach() * 2 + 3
    return Batch(((value.view(rows, 1, 2, 3) if name == "convolution" else value).requires_grad_(),))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_plain_model_by_microbatch(name: str, lanes: str) -> None:
    model, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4, lanes=lanes)
    for seed, rows in enumerate((12, 14)):
        batch = batch_of(name, rows, seed=seed)
        assert_equal_runs(forward_backward(pipe, batch), run_by_microbatch(model, batch, parts=4))


@pytest.mark.parametrize("name", MODELS)
def test_train_step_equals_the_plain_model_by_microbatch(name: str) -> None:
    model, pipe = build(name), autosplit(build(name), devices=["cpu"] * 3, chunks=4)
    for seed, rows in enumerate((12, 14)):
        batch, target = batch_of(name, rows, seed=seed), numbers(rows, 6, seed=9)
        actual = train_step(pipe, batch, target=target, loss_fn=F.mse_loss)
        loss = partial(F.mse_loss, target=target)
        expected = run_by_microbatch(model, batch, parts=4, loss=loss)
        assert_equal_runs(actual, Run({}, expected.loss, expected.gradients, expected.buffers))


@pytest.mark.parametrize(("rows", "chunks", "parts"), [(5, 4, 2), (3, 4, 1), (2, 8, 1), (9, 8, 4)])
def test_no_microbatch_is_left_with_one_value_per_channel(rows: int, chunks: int, parts: int) -> None:
    model, pipe = build("dense"), autosplit(build("dense"), devices=["cpu"] * 2, chunks=chunks)
    batch = batch_of("dense", rows)
    assert_equal_runs(forward_backward(pipe, batch), run_by_microbatch(model, batch, parts=parts))


@pytest.mark.parametrize("training", [True, False])
def test_without_running_statistics_the_whole_batch_is_normalised(training: bool) -> None:
    plain = build("untracked").train(training)
    pipe = autosplit(build("untracked").train(training), devices=["cpu"] * 2, chunks=4)
    for rows in (8, 10):
        batch = batch_of("untracked", rows)
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))


# -- running statistics of the first norm are the plain model's ------------------------------------------------------


def net(body: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> nn.Module:
    return Model(lambda m, value: m.b(body(m, m.a(value))), **parts)


def twice(net: Any, value: Tensor) -> Tensor:
    return net.norm(value) + net.norm(value.tanh())


def read_behind(net: Any, value: Tensor) -> Tensor:
    return net.norm(value) * net.norm.running_var


def one_of_two(net: Any, value: Tensor) -> Tensor:
    return F.batch_norm(value, net.buffer_means[1], net.buffer_variances[1], training=net.training, momentum=0.2)


def by_instance(net: Any, value: Tensor) -> Tensor:
    return net.norm(value.unflatten(1, (2, 3))).flatten(1)


def stack(size: int) -> Tensor:
    return torch.arange(2.0 * size).view(2, size)


def norm(**options: Any) -> nn.Module:
    return nn.BatchNorm1d(WIDTH, **options)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: net(lambda m, value: m.norm(value), norm=norm),
    "own python": lambda: net(lambda m, value: m.norm(value), norm=lambda: NormAct(WIDTH)),
    "twice": lambda: net(twice, norm=norm),
    "twice, cumulative": lambda: net(twice, norm=lambda: norm(momentum=None)),
    "read behind it": lambda: net(read_behind, norm=norm),
    "buffers in a stack": lambda: net(
        one_of_two, buffer_means=lambda: stack(WIDTH), buffer_variances=lambda: stack(WIDTH)
    ),
    "single process": lambda: net(lambda m, value: m.norm(value), norm=lambda: nn.SyncBatchNorm(WIDTH)),
    "instances": lambda: net(by_instance, norm=lambda: nn.InstanceNorm1d(2, track_running_stats=True)),
    "frozen": lambda: net(lambda m, value: m.norm(value), norm=norm),
}


def build_kind(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = KINDS[name]()
    if name == "frozen":
        model.get_submodule("norm").eval()
    return model


def assert_equal_buffers(model: nn.Module, plain: nn.Module) -> None:
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert difference(buffer.double(), expected.double()) <= 1e-12, name


@pytest.mark.parametrize("name", list(KINDS))
def test_the_first_norms_statistics_are_the_plain_models(name: str) -> None:
    model, plain = build_kind(name), build_kind(name)
    pipe, own = autosplit(model, devices=["cpu"] * 2, chunks=4), [id(buffer) for buffer in model.buffers()]
    for seed, rows in enumerate((8, 11, 3)):
        value = numbers(rows, WIDTH, seed=seed).detach()
        pipe(value)
        plain(value)
        assert_equal_buffers(model, plain)
    pipe.train_step(value, target=torch.zeros(3, WIDTH).double(), loss_fn=F.mse_loss)
    with torch.no_grad():
        plain(value)
        plain(value)
        pipe(value)
    assert_equal_buffers(model, plain)
    assert [id(buffer) for buffer in model.buffers()] == own


@in_turn(name=[name for name in KINDS if "cumulative" not in name], recompute=["never", "always"])
def test_one_microbatch_leaves_the_plain_models_bits(name: str, recompute: str) -> None:
    model, plain = build_kind(name), build_kind(name)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=1, recompute=recompute)
    for seed, rows in enumerate((8, 3, 5)):
        value = numbers(rows, WIDTH, seed=seed).detach()
        if seed == 1:
            pipe(value).sum().backward()
        else:
            pipe.train_step(value, target=torch.zeros(rows, WIDTH).double(), loss_fn=F.mse_loss)
        plain(value)
        assert all(map(torch.equal, model.buffers(), plain.buffers()))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("lanes", LANES)
def test_a_step_that_fails_midway_leaves_buffers_as_they_were(
    lanes: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), norm()).double()
    pipe, value = autosplit(model, devices=["cpu"] * 2, chunks=chunks, lanes=lanes), numbers(3 * chunks - 1, WIDTH)
    pipe(value)
    before = [(buffer.clone(), buffer._version) for buffer in model.buffers()]
    monkeypatch.setattr(nn.Tanh, "forward", _raise_at_two_rows)
    for call in (pipe, lambda x: pipe.train_step(x, target=x, loss_fn=F.mse_loss)):
        with pytest.raises(ArithmeticError, match="no more"):
            call(value)
        for buffer, (content, version) in zip(model.buffers(), before, strict=True):
            assert torch.equal(buffer, content)
            assert buffer._version == version
    monkeypatch.undo()
    pipe(value)
    assert int(model[1].num_batches_tracked) == int(before[2][0]) + 1


def _raise_at_two_rows(module: nn.Module, value: Tensor) -> Tensor:
    """The last of three microbatches of eight rows has two."""
    if len(value) == 2:
        raise ArithmeticError("no more")
    return value.tanh()


@pytest.mark.parametrize("lanes", LANES)
def test_full_norms_are_the_plain_models(lanes: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False), norm(), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), norm()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()
    plain = copy.deepcopy(model)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes=lanes, batch_norm="full")
    for seed in range(2):
        batch, target = Batch((numbers(11, WIDTH, seed=seed),)), numbers(11, WIDTH, seed=7).detach()
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
        got = train_step(pipe, batch, target=target, loss_fn=F.mse_loss)
        expected = forward_backward(plain, batch, loss=lambda output, t=target: F.mse_loss(output, t))
        assert difference(got.loss, expected.loss) <= 1e-12
        assert_equal_buffers(model, plain)
    assert "2 batch norm layers see the whole batch, as in the plain model" in " ".join(pipe.report().split())
    found = verify(model, pipe, batch.args)
    assert found.equal
    assert found.notes == ()


def test_norms_with_an_activation_and_norms_by_function_run_in_microbatches() -> None:
    model, batch = build("activated"), batch_of("activated", 12)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, sample=batch.args[0])
    assert "3 batch norm layers normalise each microbatch by itself" in " ".join(pipe.report().split())
    assert pipe.plan.class_flops["full"] == 0
    plain = build("activated")
    full = autosplit(build("activated"), devices=["cpu"] * 2, chunks=4, batch_norm="full")
    assert_equal_runs(forward_backward(full, batch), forward_backward(plain, batch))
    assert_equal_runs(forward_backward(full.eval(), batch), forward_backward(plain.eval(), batch))


def test_a_norm_without_statistics_of_the_models_sees_the_whole_batch() -> None:
    def centred(model: Any, value: Tensor) -> Tensor:
        return F.batch_norm(value.tanh(), torch.zeros(WIDTH).double(), torch.ones(WIDTH).double(), training=True)

    model, plain, batch = net(centred), net(centred), Batch((numbers(9, WIDTH),))
    plain.load_state_dict(model.state_dict())
    assert_equal_runs(
        forward_backward(autosplit(model, devices=["cpu"] * 2, chunks=3), batch), forward_backward(plain, batch)
    )
