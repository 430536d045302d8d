from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autosplit.compat import NoChunk, Pipe, PipeSequential, WithDevice
from autosplit.compat.chain import CHECKPOINTS
from tests.compat.sequential_models import assert_like_plain, mlp, rows, unet


class Local(nn.Module):
    """A pipe whose output is taken out of what it comes in."""

    def __init__(self, model: nn.Module, **options) -> None:
        super().__init__()
        self.pipe = Pipe(copy.deepcopy(model), **options)

    def forward(self, *inputs):
        return self.pipe(*inputs).local_value()


class Spreads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(a), b.tanh(), a * b


class Gathers(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return a * b + c, c


class Times(nn.Module):
    def forward(self, x: Tensor, factor, rest=None):
        return x * factor, rest


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("count", [2, 9])
def test_outputs_and_gradients_are_the_plain_model_s(checkpoint, count):
    model = nn.Sequential(mlp()[:2], mlp()[2:])
    assert_like_plain(Local(model, chunks=4, checkpoint=checkpoint), model, rows(count, 4))


def test_tuples_become_arguments():
    model = PipeSequential(Spreads(), Gathers()).double()
    assert_like_plain(Local(nn.Sequential(*model), chunks=3), model, rows(7, 3), rows(7, 3))
    nested = nn.Sequential(PipeSequential(Spreads(), Gathers()).double())
    assert_like_plain(Local(nested, chunks=3), nested[0], rows(7, 3), rows(7, 3))


def test_skips_cross_stages():
    model = unet()
    wrapped = Local(model, chunks=2)
    x = rows(5, 2, 5)
    torch.testing.assert_close(wrapped(x), model(x), rtol=1e-12, atol=1e-12)


def test_every_module_on_the_cpu_is_a_stage_and_sequentials_stay_together():
    one, two, three = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), WithDevice(nn.Linear(4, 4), "cpu")
    pipe = Pipe(nn.Sequential(one, two, three))
    assert [list(partition) for partition in pipe.partitions] == [[one], list(two), [three.module]]
    assert pipe.devices == [torch.device("cpu")] * 3
    assert all(isinstance(partition, PipeSequential) for partition in pipe.partitions)
    assert list(pipe.state_dict())[2:4] == ["partitions.1.0.weight", "partitions.1.0.bias"]
    assert (len(pipe), pipe[2], pipe[-1]) == (4, two[1], three.module)


def test_what_is_no_tensor_goes_to_every_microbatch():
    x = rows(8, 3)
    output, rest = Pipe(nn.Sequential(Times()), chunks=4)(x, 2.0, "a").to_here()
    assert torch.equal(output, x * 2.0)
    assert rest == ["a"] * 4
    assert Pipe(nn.Sequential(Times()), chunks=4)(x[:3], 2.0).local_value()[1] == [None] * 3


def test_a_tensor_may_go_whole_to_every_microbatch():
    pipe = Pipe(nn.Sequential(Factor(), nn.Tanh()), chunks=3)
    x, square = rows(6, 6), rows(6, 6)
    torch.testing.assert_close(pipe(x, NoChunk(square)).local_value(), (x @ square).tanh(), rtol=1e-12, atol=1e-12)
    pipe(x, NoChunk(square)).local_value().sum().backward()
    own, x.grad, square.grad = (x.grad, square.grad), None, None
    (x @ square).tanh().sum().backward()
    torch.testing.assert_close(own, (x.grad, square.grad), rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="NoChunk only supported for tensors, found: 3"):
        NoChunk(3)


class Factor(nn.Module):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x @ factor
