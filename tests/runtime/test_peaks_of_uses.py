"""The peak of a whole step, by the allocator: parameters of several uses, values made once, gradients that dominate."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel

from autosplit.devices import Allocations
from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.runtime.ops import fork
from benchmarks.memory_pipe import lane_bytes, mean_of

WIDTH, ROWS, LENGTH, WORDS, CHUNKS = 128, 16, 32, 1000, 4
NEAR = 0.005


class Looped(nn.Module):
    """Two layers, used again and again."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.first, self.uses = nn.Linear(WIDTH, WIDTH), uses
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for _ in range(self.uses):
            value = value + self.layers(value)
        return value


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(4 * WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return F.linear(self.layer(self.words(words)), self.words.weight)


class Biased(nn.Module):
    """An encoder's scores with a bias by distance, which is the same for all rows and put in order in every block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words, self.distances = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, 4)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, words: Tensor) -> Tensor:
        value, places = self.words(words), torch.arange(LENGTH)
        bias = self.distances(places - places[:, None] + LENGTH).permute(2, 0, 1)
        for block in self.blocks:
            heads = block(value).unflatten(-1, (4, -1)).transpose(1, 2)
            scores = heads @ heads.transpose(2, 3) + bias.contiguous()
            value = value + (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)
        return value


def albert() -> nn.Module:
    sizes = {"embedding_size": 32, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "vocab_size": WORDS}
    return AlbertModel(AlbertConfig(**sizes, num_hidden_layers=6, num_attention_heads=4), add_pooling_layer=False)


def wide(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(layers)))


def words() -> Tensor:
    return torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7 % WORDS


def values(width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))


def first_of(output: object, target: object = None) -> Tensor:
    return mean_of(output if isinstance(output, Tensor) else output[0])


def peaks(model: nn.Module, batch: Tensor, *, optimizer: str = "adamw", recompute: str = "never") -> tuple[int, int]:
    """Return the predicted and the measured bytes of a step of one stage, with the optimizer's."""
    torch.manual_seed(0)
    options = Options((torch.device("cpu"),), CHUNKS, recompute=(recompute,), measure=False, optimizer=optimizer)
    pipe = PipelinedModule(model, options)
    stepping = torch.optim.AdamW(pipe.parameters(), lr=0.0, foreach=False)

    def step() -> None:
        pipe.train_step(batch, loss_fn=first_of, loss_reduction="mean")
        if optimizer == "adamw":
            stepping.step()

    for _ in range(2):
        step()
        pipe.zero_grad(set_to_none=True)
    gc.collect()
    with Allocations() as run:
        step()
    assert pipe.plan is not None
    memory = pipe.plan.stages[0].memory
    return memory.peak_bytes, memory.parameter_bytes + memory.buffer_bytes + memory.optimizer_bytes + run.peak_bytes


CASES = [
    ("looped 3", lambda: Looped(3), values),
    ("looped 8", lambda: Looped(8), values),
    ("tied", Tied, words),
    ("albert", albert, words),
    ("biased", lambda: Biased(6), words),
    ("wide 1", lambda: wide(1), lambda: values(4 * WIDTH)),
    ("wide 2", lambda: wide(2), lambda: values(4 * WIDTH)),
]
WAYS = [("adamw", "never"), ("none", "never"), ("none", "always")]


@pytest.mark.parametrize(("optimizer", "recompute"), WAYS)
@pytest.mark.parametrize(("name", "model", "batch"), CASES, ids=[name for name, *_ in CASES])
def test_the_peak_of_a_step_is_the_plans(
    name: str, model: object, batch: object, optimizer: str, recompute: str
) -> None:
    assert callable(model)
    assert callable(batch)
    predicted, measured = peaks(model(), batch(), optimizer=optimizer, recompute=recompute)
    assert abs(predicted / measured - 1) <= NEAR, (predicted, measured)


@pytest.mark.parametrize("stages", [1, 2])
def test_every_use_has_a_cast_and_a_gradient_under_autocast(stages: int) -> None:
    options = Options((torch.device("cpu"),) * stages, CHUNKS, recompute=("never",), measure=False)
    with torch.autocast("cpu", torch.bfloat16):
        for predicted, measured in lane_bytes(PipelinedModule(Looped(4), options), (values(),)):
            assert abs(predicted / measured - 1) <= NEAR, (predicted, measured)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_uses_are_added_from_the_last_to_the_first(create_graph: bool) -> None:
    value = torch.ones(1000, requires_grad=True)
    uses = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(5)]
    total = sum((alias * use).sum() for alias, use in zip(fork(value, 5), uses, strict=True))
    (gradient,) = torch.autograd.grad(total, value, create_graph=create_graph)
    expected = uses[-1]
    for use in uses[-2::-1]:
        expected = expected + use
    assert torch.equal(gradient, expected)
    if create_graph:
        assert all(torch.equal(g, torch.ones(1000)) for g in torch.autograd.grad(gradient.sum(), uses))
