"""Recurrent networks of several layers are entered: one node per layer, and the numbers of torch's own module."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autosplit import Sample, autosplit
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from autosplit.trace.scope import is_stack, run_stack
from tests.equivalence.equality import LANES, Batch, assert_equal_runs, forward_backward

FEATURES, HIDDEN, STEPS, ROWS = 3, 4, 2, 8
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


def stack(kind: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    more = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
    return KINDS[kind](FEATURES, HIDDEN, **more, **options).double()


def value(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def states(module: nn.RNNBase, rows: int) -> Any:
    layers = module.num_layers * (1 + module.bidirectional)
    hidden = value(layers, rows, module.proj_size or module.hidden_size, seed=1)
    return (hidden, value(layers, rows, module.hidden_size, seed=2)) if isinstance(module, nn.LSTM) else hidden


def batch(module: nn.RNNBase, rows: int = ROWS, seed: int = 0) -> Tensor:
    return value(*((rows, STEPS) if module.batch_first else (STEPS, rows)), FEATURES, seed=seed)


SHAPES = list(product(KINDS, (2, 3), (False, True), (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(("kind", "layers", "bidirectional", "bias", "batch_first", "given"), SHAPES)
def test_run_stack_has_the_bits_of_the_module(
    kind: str, layers: int, bidirectional: bool, bias: bool, batch_first: bool, given: bool
) -> None:
    options = {"num_layers": layers, "bidirectional": bidirectional, "bias": bias, "batch_first": batch_first}
    for projected in (0, 2) if kind == "LSTM" else (0,):
        module = stack(kind, **options, **({"proj_size": projected} if projected else {}))
        args = (batch(module), states(module, ROWS)) if given else (batch(module),)
        assert is_stack(module, args)
        found = []
        for run in (module, lambda *args, module=module: run_stack(module, *args)):
            module.zero_grad()
            output, last = run(*args)
            ends = last if isinstance(last, tuple) else (last,)
            sum((part * (1 + part.detach().sin())).sum() for part in (output, *ends)).backward()
            found.append((output, *ends, *(p.grad for p in module.parameters())))
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


class Tagger(nn.Module):
    """A recurrent stack between two layers."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stack = stack(kind, **options)
        self.head = nn.LazyLinear(2).double()
        self.head(self.stack(batch(self.stack))[0])

    def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        output, last = self.stack(x) if states is None else self.stack(x, states)
        return torch.tanh(self.head(output)), last


@pytest.mark.parametrize(("kind", "given"), [("LSTM", True), ("GRU", False), ("relu", True)])
def test_one_node_per_layer(kind: str, given: bool) -> None:
    model = Tagger(kind, num_layers=3, batch_first=True, bidirectional=kind != "GRU")
    x = batch(model.stack).detach()
    dims: Any = {"x": 0, "states": 1}
    hx = tuple(s.detach() for s in states(model.stack, ROWS)) if kind == "LSTM" else states(model.stack, ROWS).detach()
    sample = Sample(x, hx) if given else Sample(x)
    found = trace(model, sample, batch_dims=dims if given else None)
    label = {"LSTM": "lstm", "GRU": "gru", "relu": "rnn_relu"}[kind]
    infos = {info.name: info for _, info in found.graph.compute_nodes()}
    layers = [info for name, info in infos.items() if name.startswith(f"stack#0/{label}_") and "." not in name]
    assert [info.name for info in layers] == [f"stack#0/{label}_{index}" for index in range(3)]
    assert {info.node_class for info in layers} == {NodeClass.MICRO}
    assert all(info.reads and all(f"_l{index}" in name for name in info.reads) for index, info in enumerate(layers))
    assert found.whole == {}


@pytest.mark.parametrize(("kind", "given", "lanes"), [("LSTM", True, "threads"), ("GRU", False, "inline")])
def test_a_split_stack_equals_the_plain_model(kind: str, given: bool, lanes: str) -> None:
    model = Tagger(kind, num_layers=3, batch_first=not given, bidirectional=given)
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 3, chunks=3, lanes=lanes, batch_dims=1 if given else None)
    for seed, rows in enumerate((ROWS, 1, 10)):
        args = (batch(model.stack, rows, seed), *([states(model.stack, rows)] if given else []))
        runs = []
        for module in (model, pipe):
            own = [tuple(s.detach() for s in a) if isinstance(a, tuple) else a for a in args]
            runs.append(forward_backward(module, Batch(tuple(own))))
        assert_equal_runs(runs[1], runs[0])
    assert pipe.plan.rung == "recorded"
    assert all(any(name.startswith("stack#0/") for name in stage.nodes) for stage in pipe.plan.stages[:2])


class Packed(nn.Module):
    """Runs its stack on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(FEATURES, FEATURES).double()
        self.stack = stack("LSTM", num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, 2).double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(torch.tanh(self.embed(x)), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.stack(packed)[0], batch_first=True)
        return self.head(output)


def test_packed_sequences_are_right() -> None:
    model = Packed()
    pipe = autosplit(copy.deepcopy(model), devices=["cpu"] * 2, chunks=3)
    for seed, lengths in enumerate(([2, 1, 1, 2, 2, 1, 1], [1, 2, 1, 1, 1, 2, 2], [2, 2, 1])):
        inputs = Batch((value(len(lengths), STEPS, FEATURES, seed=seed), torch.tensor(lengths)))
        assert_equal_runs(forward_backward(pipe, inputs), forward_backward(model, inputs))


@pytest.mark.parametrize("lanes", LANES)
def test_dropout_between_layers_is_drawn_for_every_microbatch(lanes: str) -> None:
    model = Tagger("GRU", num_layers=2, batch_first=True, dropout=0.5)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=3, lanes=lanes)
    same = value(1, STEPS, FEATURES).detach().expand(6, -1, -1).contiguous()
    first, second = pipe(same)[0].detach(), pipe(same)[0].detach()
    assert not torch.equal(first, second)
    microbatches = first.split(2)
    assert not any(torch.equal(a, b) for a, b in zip(microbatches[1:], microbatches[:-1], strict=True))
    pipe.eval()
    torch.testing.assert_close(pipe(same)[0], model(same)[0], rtol=1e-12, atol=1e-12)
