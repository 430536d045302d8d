"""A second run sees what the first one saw: buffers that the forward writes, attributes, parameters and inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.devices import Allocations
from tests.pairwise import in_turn

WIDTH, ROWS, CHUNKS = 4, 10, 3


class Block(nn.Module):
    """Reads a buffer, and writes it when it has the result."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(width, width), nn.LeakyReLU(0.1), nn.Dropout(0.25)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("table", torch.zeros(2, width))
        self.register_buffer("count", torch.zeros(()))
        self.mean: Tensor
        self.table: Tensor
        self.count: Tensor

    def forward(self, value: Tensor) -> Tensor:
        value = self.drop(self.act(self.linear(torch.tanh(self.read(value)))))
        with torch.no_grad():
            self.write(value.detach())
        return value

    def read(self, value: Tensor) -> Tensor:
        return value - self.mean

    def write(self, value: Tensor) -> None:
        pass


class InPlace(Block):
    def write(self, value: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.5 * value.mean(0))


class Assigned(Block):
    def write(self, value: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.5 * value.mean(0)


class ByData(Block):
    def write(self, value: Tensor) -> None:
        self.mean.data.copy_(0.9 * self.mean + 0.5 * value.mean(0))


class Counted(Block):
    """The value that it writes depends on no row."""

    def read(self, value: Tensor) -> Tensor:
        return value + self.count

    def write(self, value: Tensor) -> None:
        self.count.add_(0.5)


class CountedBefore(Counted):
    def read(self, value: Tensor) -> Tensor:
        self.count.add_(0.5)
        return value + self.count

    def write(self, value: Tensor) -> None:
        pass


class Part(Block):
    """Reads a view of what it writes."""

    def read(self, value: Tensor) -> Tensor:
        return value - self.table[0]

    def write(self, value: Tensor) -> None:
        self.table.mul_(0.9).add_(0.5 * value.mean(0))


class Nearest(Block):
    """Vector quantisation whose code book follows the values."""

    def read(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            codes = torch.cdist(value, self.table + torch.arange(2.0).view(2, 1)).argmin(1)
        return value + (F.embedding(codes, self.table) - value).detach() * 0.5

    def write(self, value: Tensor) -> None:
        self.table.mul_(0.9).add_(0.5 * value.mean(0))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = value + block(value)
        return self.last(value)


KINDS: dict[str, Callable[[], Block]] = {
    own.__name__: own for own in (InPlace, Assigned, ByData, Counted, CountedBefore, Part, Nearest)
}
WAYS = [("inline", "always", "gpipe"), ("threads", "block", "1f1b"), ("threads", "except_last", "zb_h1")]


def value(seed: int = 3) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(block: Callable[[], nn.Module], way: tuple[str, str, str]) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(block).double()
    lanes, recompute, schedule = way
    own = copy.deepcopy(model)
    return model, autosplit(own, devices=2, chunks=CHUNKS, lanes=lanes, recompute=recompute, schedule=schedule)


def left(module: nn.Module) -> list[Tensor]:
    return [*(p.grad for p in module.parameters() if p.grad is not None), *module.buffers()]


def assert_left_equal(pipe: nn.Module, model: nn.Module) -> None:
    for found, wanted in zip(left(pipe), left(model), strict=True):
        torch.testing.assert_close(found, wanted)


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


@in_turn(share=(0, 2), rest=False, kind=list(KINDS), way=WAYS)
def test_buffers_that_the_forward_writes(kind: str, way: tuple[str, str, str]) -> None:
    model, pipe = pair(KINDS[kind], way)
    for seed in range(3):
        torch.manual_seed(seed)
        mean_of(model(value(seed)), value(9)).backward()
        torch.manual_seed(seed)
        if seed == 1:
            pipe.train_step(value(seed), target=value(9), loss_fn=mean_of)
        else:
            mean_of(pipe(value(seed)), value(9)).backward()
        assert_left_equal(pipe, model)


def to_eval(module: nn.Module) -> None:
    module.eval()


def other_numbers(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.LeakyReLU):
            part.negative_slope = 0.7
        if isinstance(part, nn.Dropout):
            part.p = 0.9


def other_call(module: nn.Module) -> None:
    other_numbers(module)
    with torch.no_grad():
        module(value(7))


@in_turn(change=(to_eval, other_numbers, other_call), way=WAYS)
def test_attributes_changed_between_forward_and_backward(
    change: Callable[[nn.Module], None], way: tuple[str, str, str]
) -> None:
    model, pipe = pair(Block, way)
    for module in (model, pipe):
        torch.manual_seed(1)
        loss = mean_of(module(value()), value(9))
        change(module)
        loss.backward()
    assert_left_equal(pipe, model)
    assert [m.training for m in pipe.modules()] == [m.training for m in model.modules()]
    assert pipe.blocks[0].act.negative_slope == model.blocks[0].act.negative_slope


def freeze(pipe: Any) -> None:
    pipe.requires_grad_(False)


def write_parameter(pipe: Any) -> None:
    with torch.no_grad():
        pipe.blocks[0].linear.weight.mul_(2)


def write_buffer(pipe: Any) -> None:
    pipe.blocks[0].mean.add_(1)


LOST: dict[str, tuple[Callable[[Any], None], str]] = {
    "frozen": (freeze, "a parameter of .*got requires_grad=False between the forward and the backward"),
    "a parameter": (write_parameter, "a parameter of .*was changed in place"),
    "a buffer": (write_buffer, "a buffer of .*was changed in place"),
}


@in_turn(share=(0, 3), name=list(LOST), way=WAYS[1::-1])
def test_what_cannot_be_had_back_is_an_error(name: str, way: tuple[str, str, str]) -> None:
    change, words = LOST[name]
    _, pipe = pair(Block, way)
    loss = pipe(value()).sum()
    change(pipe)
    with pytest.raises(RuntimeError, match=f"{words}.*recompute='never'"):
        loss.backward()


def test_parameters_of_a_functional_call_are_those_of_the_second_run() -> None:
    model, pipe = pair(Block, WAYS[0])
    found = []
    for module in (model, pipe):
        own = {name: (p * 2).detach().requires_grad_() for name, p in module.named_parameters()}
        torch.manual_seed(1)
        mean_of(torch.func.functional_call(module, own, (value(),)), value(9)).backward()
        found.append([p.grad for p in own.values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class Wide(InPlace):
    """A buffer that is large beside what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(1 << 13, WIDTH))
        self.large: Tensor

    def read(self, value: Tensor) -> Tensor:
        return value + F.embedding(value.argmax(1), self.large)

    def write(self, value: Tensor) -> None:
        self.large.add_(value.mean())


def test_the_copies_are_in_the_memory_that_is_predicted() -> None:
    batch = torch.randn(ROWS, WIDTH)
    pipe = autosplit(Net(Wide, count=2), devices=1, chunks=CHUNKS, recompute="always", lanes="inline", schedule="gpipe")
    output = pipe(batch)
    output.sum().backward()
    del output
    pipe.zero_grad()
    with Allocations() as run:
        pipe(batch).sum().backward()
    assert pipe.plan is not None
    memory = pipe.plan.stages[0].memory
    copies = CHUNKS * 2 * 4 * WIDTH << 13
    assert run.peak_bytes > copies
    assert memory.activation_bytes > copies
    buffers = sum(buffer.nbytes for buffer in pipe.buffers())
    there_before = memory.parameter_bytes + memory.optimizer_bytes + buffers
    assert memory.peak_bytes - there_before == pytest.approx(run.peak_bytes, rel=0.02)
