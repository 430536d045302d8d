"""Objects in a model's output that hold tensors: taken apart, merged over the microbatches, and put together again."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit, verify
from tests.clients.models import gpt2, llama

X = torch.randn(8, 6, dtype=torch.float64)


class Layer:
    """A layer of a cache: tensors and numbers in attributes."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.rows = self.seen = 0

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys, self.rows, self.seen = torch.cat([keys, keys], 1), len(keys), self.seen + 1
        return self.keys


class Cache:
    """Layers in a list, one that is never used, and a way back to the first."""

    def __init__(self, layers: int) -> None:
        self.layers = [Layer() for _ in range(layers + 1)]
        self.first = self.layers[0]
        self.owner = self
        self.kind = torch.float64


class Slotted:
    """An object without a dictionary of its own."""

    __slots__ = ("__hidden", "total")

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total
        self.__hidden = 2 * total

    def hidden(self) -> torch.Tensor:
        return self.__hidden


class Named(dict[str, Any]):
    """A dict of a class of its own, with an attribute."""

    note = "none"


class Rows(list[torch.Tensor]):
    """A list of a class of its own."""


@dataclass
class Output:
    """What the model returns."""

    out: torch.Tensor
    cache: Cache
    slotted: Slotted
    named: Named
    others: Any


class Blocks(nn.Module):
    """A model that returns a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Output:
        """Fill a cache that is made anew."""
        cache = Cache(len(self.blocks))
        for block, layer in zip(self.blocks, cache.layers, strict=False):
            x = torch.tanh(block(x)) + layer.update(x)[:, 6:]
        named = Named(x=x)
        named.note = "some"
        others = SimpleNamespace(all=UserDict(twice=2 * x), rows=Rows([x, x + 1]), text="text", scale=torch.ones(3))
        return Output(x.square(), cache, Slotted(x.exp()), named, others)


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_objects_come_back_equal_in_all_microbatches(lanes: str) -> None:
    model = Blocks()
    pipe = autosplit(model, devices=2, chunks=4, sample=X, lanes=lanes)
    assert pipe.plan is not None
    assert pipe.plan.chunks == 4
    assert len(pipe.plan.boundaries) < 8
    for x in (X, torch.randn(6, 6, dtype=torch.float64)):
        want, got = model(x), pipe(x)
        _same(want, got)
        assert len(pipe.graph.find_nodes(op="call_module", target="stage0")) == 4


def _same(want: Output, got: Output) -> None:
    assert type(got) is Output
    assert type(got.cache) is Cache
    assert got.cache.owner is got.cache
    assert got.cache.first is got.cache.layers[0]
    assert got.cache.kind is torch.float64
    for a, b in zip(want.cache.layers, got.cache.layers, strict=True):
        assert (a.rows, a.seen) == (b.rows, b.seen)
        assert (a.keys is None) == (b.keys is None)
        if a.keys is not None and b.keys is not None:
            torch.testing.assert_close(b.keys, a.keys)
    torch.testing.assert_close(got.slotted.hidden(), want.slotted.hidden())
    torch.testing.assert_close(got.slotted.total, want.slotted.total)
    assert type(got.named) is Named
    assert got.named.note == "some"
    torch.testing.assert_close(got.named["x"], want.named["x"])
    assert type(got.others.rows) is Rows
    assert got.others.text == "text"
    torch.testing.assert_close(list(got.others.rows), list(want.others.rows))
    torch.testing.assert_close(got.others.all["twice"], want.others.all["twice"])
    torch.testing.assert_close(got.others.scale, want.others.scale)


def test_gradients_flow_through_objects() -> None:
    model = Blocks()
    pipe = autosplit(model, devices=2, chunks=4, sample=X)
    wanted = []
    for each in (model, pipe):
        output = each(X)
        keys = [layer.keys for layer in output.cache.layers if layer.keys is not None]
        loss = output.out.sum() + sum(key.square().sum() for key in keys)
        wanted.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*wanted)


def test_train_step_and_verify() -> None:
    model = Blocks()
    pipe = autosplit(model, devices=2, chunks=4, sample=X)

    def loss_fn(output: Output, target: torch.Tensor) -> torch.Tensor:
        return (output.out - target).square().mean()

    checked = verify(model, pipe, X, target=X, loss_fn=loss_fn)
    assert checked.equal, checked


class Pair:
    """A batch as an object: tensors in a list and in attributes, and a number."""

    def __init__(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 2.0) -> None:
        self.parts = [x, x + 1]
        self.mask, self.scale = mask, scale


class Takes(nn.Module):
    """Reads a batch object; with ``keeps`` it changes it as well."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))
        self.keeps = keeps

    def forward(self, batch: Pair) -> torch.Tensor:
        """Return what the layers make of both parts."""
        x = self.layers(batch.parts[0] + batch.scale * batch.parts[1]) * batch.mask
        if self.keeps:
            batch.parts[1] = x
        return x


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_objects_as_inputs(lanes: str) -> None:
    model = Takes()
    pipe = autosplit(model, devices=2, chunks=4, lanes=lanes)
    for rows, scale in ((8, 2.0), (6, 2.0), (8, 3.0)):
        x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
        given = Pair(x, torch.rand(rows, 6, dtype=torch.float64) + 0.5, scale)
        wanted, got = model(given), pipe(given)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (got, wanted)))
        assert len(pipe.graph.find_nodes(op="call_module", target="stage0")) == 4


def test_an_object_that_the_forward_changes_is_the_callers_own() -> None:
    model = Takes(keeps=True)
    pipe = autosplit(model, devices=2, chunks=4)
    mine, other = (Pair(X, torch.ones(8, 6, dtype=torch.float64)) for _ in range(2))
    for _ in range(2):
        torch.testing.assert_close(pipe(mine), model(other))
        torch.testing.assert_close(mine.parts[1], other.parts[1])
    assert pipe.plan is not None
    assert pipe.plan.rung == "module tree"
    assert any("object that it is given" in note for note in pipe.plan.notes)


# -- transformers' models with their default use_cache=True ----------------------------------------------------------
def ids(rows: int, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_cache_is_the_plain_models(make: Any) -> None:
    silent = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if make is gpt2 else {}
    model, batch = make(use_cache=True, **silent).double(), ids(8)
    pipe = autosplit(model, devices=2, chunks=4, sample=batch)
    for given in (batch, ids(6)):
        want, got = model(given), pipe(given)
        assert len(pipe.graph.find_nodes(op="call_module", target="stage0")) == 4
        assert type(got) is type(want)
        assert type(got.past_key_values) is type(want.past_key_values)
        assert got.past_key_values.get_seq_length() == 7
        torch.testing.assert_close(got.logits, want.logits)
        for mine, plain in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert vars(mine).keys() == vars(plain).keys()
            torch.testing.assert_close(mine.keys, plain.keys)
            torch.testing.assert_close(mine.values, plain.values)
        following = ids(len(given), 1)
        after = [model(following, past_key_values=out.past_key_values).logits for out in (want, got)]
        torch.testing.assert_close(*after)
