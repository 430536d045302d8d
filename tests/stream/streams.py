"""Streams beside their reference: the same model and minibatches, the losses and the state that come out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import Sample, autosplit
from tests.stream import reference

CPU = torch.device("cpu")


class Skipping(nn.Module):
    """A tied embedding, a skip over all stages, a value that depends on no row, and dropout."""

    def __init__(self, words: int = 11, width: int = 6, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(words, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        first = value = self.table(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            value = self.dropout(block(value))
        return self.head(value + first)


class Normed(nn.Module):
    """Norms with running statistics on several stages."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(4)]
        self.layers = nn.Sequential(*layers, nn.Linear(6, 3))

    def forward(self, value: Tensor) -> Tensor:
        return self.layers(value)


def words(count: int, rows: Sequence[int] = (4,)) -> list[tuple[Any, Any]]:
    made = [torch.randint(11, (rows[number % len(rows)], 6)) for number in range(count)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in made]


def vectors(count: int, rows: Sequence[int] = (4,)) -> list[tuple[Any, Any]]:
    sizes = [rows[number % len(rows)] for number in range(count)]
    return [(torch.randn(own, 6, dtype=torch.float64), torch.randint(3, (own,))) for own in sizes]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW; its epsilon is larger than the rounding of gradients that are zero."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


@dataclass
class Pair:
    """A pipe, the model that it runs, and a copy of that for the reference."""

    model: nn.Module
    plain: nn.Module
    pipe: Any
    stage_of: dict[str, int]
    how: dict[str, Any]

    def twin(self) -> Pair:
        """Return the same again, as it was before any training, cut alike: a cut depends on measured times."""
        model, plain = copy.deepcopy(self.plain), copy.deepcopy(self.plain)
        return Pair(model, plain, autosplit(model, plan=self.pipe.plan, **self.how), {}, self.how)

    def find_stages(self, item: Any) -> None:
        """Note which stage has which parameters, by a twin's training on a minibatch."""
        twin = self.twin()
        run(twin, [item], "stash", sgd)
        self.stage_of.update(twin.stage_of)

    def assert_equal(self, tolerance: float = 1e-12) -> None:
        torch.testing.assert_close(self.model.state_dict(), self.plain.state_dict(), rtol=tolerance, atol=tolerance)


def pair(
    make: Callable[[], nn.Module], sample: Any, *, stages: int = 3, chunks: int = 2, lanes: str = "threads", **how: Any
) -> Pair:
    """Split a model of seed 0, in float64; ``replicas`` are those of each stage."""
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    replicas = how.pop("replicas", None)
    how |= {"devices": [CPU] * sum(replicas or [1] * stages), "chunks": chunks, "lanes": lanes}
    return Pair(model, plain, autosplit(model, sample=Sample.of(sample), replicas=replicas, **how), {}, how)


def stream_of(own: Pair, items: Any, make: Any = sgd, **how: Any) -> Any:
    """Return a stream of minibatches with the loss of words."""
    return own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=make, **how)


def run(own: Pair, items: Sequence[Any], staleness: str, make: Any, loss_fn: Any = cross_entropy) -> list[float]:
    """Return the losses of a stream with an optimizer per stage, and note which stage has which parameters."""
    names = {id(parameter): name for name, parameter in own.model.named_parameters()}
    own.stage_of.clear()
    holders = (stage.index for stage in own.pipe.plan.stages if stage.parameters)

    def made(parameters: list[nn.Parameter]) -> Any:
        stage = next(holders)
        own.stage_of.update({names[id(parameter)]: stage for parameter in parameters})
        return make(parameters)

    torch.manual_seed(7)
    stream = own.pipe.train_stream(items, loss_fn=loss_fn, optimizer=made, staleness=staleness)
    return [loss.item() for loss in stream]


def expected(
    own: Pair, items: Iterable[Any], staleness: str, make: Any, loss_fn: Any = cross_entropy, **how: Any
) -> list[float]:
    """Return the losses of the reference."""
    torch.manual_seed(7)
    replicas = [stage.replicas for stage in own.pipe.plan.stages]
    given = (((Sample.of(inputs).args, Sample.of(inputs).kwargs), target) for inputs, target in items)
    return reference.train(own.plain, own.stage_of, replicas, staleness, given, loss_fn, make, **how)


def check(own: Pair, items: Sequence[Any], staleness: str, make: Any, loss_fn: Any = cross_entropy) -> None:
    """Hold a stream's losses and the state that it leaves against the reference's, to 1e-12."""
    found = run(own, items, staleness, make, loss_fn)
    assert found == pytest.approx(expected(own, items, staleness, make, loss_fn), rel=1e-12, abs=1e-12)
    own.assert_equal()
