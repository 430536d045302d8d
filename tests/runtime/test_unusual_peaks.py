"""The peaks of pipes are the plans': under every schedule, and of models that are no plain chain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from benchmarks.memory_pipe import ASKED, lane_bytes
from tests.models.blocks import WideBlock

WIDTH, WORDS, ROWS, LENGTH, CHUNKS, STAGES = 48, 400, 12, 24, 4, 3
BROAD, NEAR = 64, 0.05


def up_and_down(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, WIDTH))


class Recurrent(nn.Module):
    """Two LSTMs between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.lower, self.upper = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        value, _ = self.lower(self.words(words))
        value, _ = self.upper(value)
        return self.head(value)


class Experts(nn.Module):
    """Every token goes to all experts, by a gate's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))
        self.experts = nn.ModuleList(nn.ModuleList(up_and_down(WIDTH, 3 * WIDTH) for _ in range(3)) for _ in range(3))

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights = gate(value).softmax(-1)
            value = value + sum(weights[..., k : k + 1] * expert(value) for k, expert in enumerate(experts))
        return value


class Grouped(nn.Module):
    """Depthwise and grouped convolutions with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 64, 1), nn.SiLU(), nn.Conv2d(64, 64, 3, groups=64), nn.Conv2d(64, 16, 1, groups=4)
            )
            for _ in range(3)
        )

    def forward(self, images: Tensor) -> Tensor:
        value = self.first(images)
        for block in self.blocks:
            value = value + F.pad(block(value), (1, 1, 1, 1))
        return value.mean((2, 3))


class Bags(nn.Module):
    """An embedding bag beside the highest of an embedding's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.words = nn.EmbeddingBag(4 * WORDS, WIDTH, mode="mean"), nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        value = torch.cat([self.bag(words), self.words(words).amax(1)], -1)
        for layer in self.layers:
            value = torch.relu(layer(value))
        return value


class Tied(nn.Module):
    """The head is the embedding, and a layer in the first stage is one in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.twice = nn.Embedding(4 * WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(up_and_down(WIDTH, 4 * WIDTH) for _ in range(5))

    def forward(self, words: Tensor) -> Tensor:
        value = self.twice(self.words(words))
        for layer in self.layers:
            value = value + layer(value)
        return F.linear(self.twice(value), self.words.weight)


class Skips(nn.Module):
    """Values of the way down jump over several stages to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.down = nn.ModuleList(up_and_down(WIDTH, 2 * WIDTH) for _ in range(4))
        self.up = nn.ModuleList(up_and_down(2 * WIDTH, 2 * WIDTH) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        value, kept = self.first(values), list[Tensor]()
        for down in self.down:
            value = down(value)
            kept.append(value)
        for up in self.up:
            value = up(torch.cat([value, kept.pop()], -1))
        return value


class Maxima(nn.Module):
    """What was taken out of a value is written back into zeros in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        value = self.first(values)
        for layer in self.layers:
            highest = layer(value).unflatten(-1, (4, WIDTH)).max(-2).values
            value = value + highest.sort(-1).values.gather(-1, torch.zeros_like(highest, dtype=torch.long))
        return value


def words() -> Tensor:
    return torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7 % WORDS


def values() -> Tensor:
    return torch.randn(ROWS, LENGTH, 4, generator=torch.Generator().manual_seed(0))


def images() -> Tensor:
    return torch.randn(ROWS, 1, 20, 20, generator=torch.Generator().manual_seed(0))


CASES = [
    (Recurrent, words),
    (Experts, words),
    (Grouped, images),
    (Bags, words),
    (Tied, words),
    (Skips, values),
    (Maxima, values),
]


@pytest.mark.parametrize(("model", "batch"), CASES, ids=lambda part: part.__name__)
def test_the_peaks_of_unusual_models_are_the_plans(model: type[nn.Module], batch: object) -> None:
    assert callable(batch)
    torch.manual_seed(0)
    devices = (torch.device("cpu"),) * STAGES
    options = Options(devices, CHUNKS, schedule="1f1b", recompute=("never",), measure=False)
    for predicted, measured in lane_bytes(PipelinedModule(model(), options), (batch(),)):
        assert abs(predicted / measured - 1) <= NEAR, (predicted, measured)


class Tower(nn.Module):
    """Eight equal blocks between two layers; the first block's input is added behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(BROAD, BROAD), nn.Linear(BROAD, 4 * BROAD)
        self.blocks = nn.ModuleList(WideBlock(BROAD, norm=True) for _ in range(8))

    def forward(self, value: Tensor) -> Tensor:
        skip = value = self.first(value)
        for block in self.blocks:
            value = block(value)
        return self.last(value + skip)


WAYS = [
    ("1f1b", 1, "never"),
    ("1f1b", 1, "except_last"),
    ("gpipe", 1, "block"),
    ("interleaved", 2, "never"),
    ("looped_bfs", 2, "always"),
    ("zb_h1", 1, "except_last"),
    ("zb_v", 2, "block"),
]
FEW = [pytest.param(*case, marks=() if place % 3 == 0 else pytest.mark.slow) for place, case in enumerate(WAYS)]


@pytest.mark.parametrize(("schedule", "virtual_stages", "recompute"), FEW)
def test_the_peaks_of_a_pipe_are_the_plans(schedule: str, virtual_stages: int, recompute: str) -> None:
    options = Options(
        (torch.device("cpu"),) * 2,
        8,
        schedule=schedule,
        virtual_stages=virtual_stages,
        recompute=(recompute,),
        measure=False,
    )
    batch = torch.randn(32, BROAD, generator=torch.Generator().manual_seed(0))
    for predicted, measured in lane_bytes(PipelinedModule(Tower(), options), (batch,)):
        assert abs(predicted / measured - 1) <= ASKED, (predicted, measured)
