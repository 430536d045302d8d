"""The second rung: what dynamo captures where a model's own calls cannot be recorded, and where it may not be used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit import Sample, TraceError, autosplit, verify
from autosplit.trace.capture import Capture
from autosplit.trace.graph import NodeClass
from autosplit.trace.inputs import flatten
from autosplit.trace.ladder import trace
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.equivalence.trap_models import WIDTH, Model, numbers

TABLE = numpy.linspace(0.5, 1.5, WIDTH)
ROWS = Batch((numbers(7, WIDTH),))


def table(model: Any, value: Tensor) -> Tensor:
    return model.b(model.a(value) * torch.from_numpy(TABLE))


def numpy_table(model: Any, value: Tensor) -> Tensor:
    return model.b(model.a(value) * torch.from_numpy(numpy.sqrt(numpy.arange(value.shape[1]) + 1.0)))


def numpy_features(model: Any, value: Tensor) -> Tensor:
    return model.b(model.a(value) + torch.from_numpy(numpy.sin(value.detach().numpy())))


def functional(model: Any, value: Tensor) -> Tensor:
    state = {"weight": model.b.weight * 2, "bias": model.b.bias}
    return torch.func.functional_call(model.b, state, (torch.relu(model.a(value)),))


def assigned(model: Any, value: Tensor) -> Tensor:
    model.buffer_ema = 0.9 * model.buffer_ema + 0.1 * value.detach().mean(0)
    return table(model, value) * model.buffer_ema


def in_blocks(model: Any, value: Tensor) -> dict[str, Tensor]:
    """Go through a list of blocks, one of them twice, with a table of numpy's at the root."""
    for block in (*model.blocks, model.blocks[0]):
        value = block(value)
    with torch.no_grad():
        scale = torch.from_numpy(TABLE) * model.buffer_scale
    return {"value": value * scale}


def blocks() -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.ReLU()) for _ in range(2)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a table of numpy's": lambda: Model(table),
    "a table made by numpy": lambda: Model(numpy_table),
    "numpy inside forward": lambda: Model(numpy_features),
    "a functional call": lambda: Model(functional),
    "blocks and a table": lambda: Model(in_blocks, blocks=blocks, buffer_scale=torch.ones(WIDTH, dtype=torch.float64)),
}


def captured(model: nn.Module, sample: Sample) -> Any:
    found = trace(model, sample)
    assert found.rung == "captured"
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_what_cannot_be_recorded_is_captured(name: str, training: bool) -> None:
    found = captured(MODELS[name]().train(training), Sample(*ROWS.args))
    classes = {info.node_class for _, info in found.graph.compute_nodes()}
    assert NodeClass.MICRO in classes
    assert found.graph.min_rows == (2 if training and name == "blocks and a table" else 1)


@pytest.mark.parametrize("name", MODELS)
def test_captured_models_equal_the_plain_ones(name: str) -> None:
    plain = MODELS[name]().eval()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for rows in (7, 4):
        batch = Batch((numbers(rows, WIDTH, seed=rows),))
        assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch))
    assert pipe.plan.rung == "captured"
    assert list(pipe.state_dict()) == list(plain.state_dict())
    found = verify(pipe.unsplit(), pipe, ROWS.args)
    assert found, str(found)


def test_names_are_those_of_the_modules() -> None:
    found = captured(MODELS["blocks and a table"](), Sample(*ROWS.args))
    names = [info.name for _, info in found.graph.compute_nodes()]
    assert "blocks.0.0#0/linear_0" in names
    assert "blocks.0.0#1/linear_0" in names
    assert "blocks.1.1#0/batch_norm_0" in names
    written = {name for _, info in found.graph.compute_nodes() for name in info.writes}
    assert {"blocks.0.1.running_mean", "blocks.1.1.num_batches_tracked"} <= written


def test_a_later_change_of_the_parameters_is_seen() -> None:
    plain = Model(table)
    pipe = autosplit(plain, devices=["cpu"] * 2, chunks=3)
    before = pipe(*ROWS.args)
    with torch.no_grad():
        plain.b.weight.zero_()
    assert torch.equal(pipe(*ROWS.args), plain(*ROWS.args))
    assert not torch.equal(pipe(*ROWS.args), before)


# -- where dynamo may not be used --------------------------------------------------------------------------------
class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


def checkpointed(model: Any, value: Tensor) -> Tensor:
    return table(model, checkpoint(lambda x: F.dropout(model.c(x), 0.5, model.training), value, use_reentrant=False))


def counted(model: Any, value: Tensor) -> Tensor:
    model.calls += 1
    return table(model, value)


def listed(model: Any, value: Tensor) -> Tensor:
    model.seen.append(len(model.seen))
    return table(model, value)


def kept(model: Any, value: Tensor) -> Tensor:
    model.last = model.a(value).detach()
    return table(model, value)


LIES: dict[str, Callable[[], nn.Module]] = {
    "a buffer that is assigned": lambda: Model(assigned, buffer_ema=torch.ones(WIDTH, dtype=torch.float64)),
    "a checkpoint with dropout": lambda: Model(checkpointed),
    "a counter in Python": lambda: Model(counted, calls=0),
    "a list that grows": lambda: Model(listed, seen=list),
    "a tensor that is kept": lambda: Model(kept, last=None),
    "a custom function": lambda: Model(lambda m, x: table(m, Halved.apply(m.c(x)))),
    "a map over rows": lambda: Model(lambda m, x: table(m, torch.vmap(torch.tanh)(x))),
}


@pytest.mark.parametrize("name", LIES)
def test_what_dynamo_would_lose_is_refused(name: str) -> None:
    model = LIES[name]()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TraceError):
        trace(model, Sample(*ROWS.args))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert getattr(model, "calls", 0) == 0
    assert getattr(model, "seen", []) == []
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["a counter in Python", "a list that grows", "a tensor that is kept"])
def test_an_attribute_that_forward_changes_is_named(name: str) -> None:
    model = LIES[name]()
    attribute = {"a counter in Python": "calls", "a list that grows": "seen", "a tensor that is kept": "last"}[name]
    with pytest.raises(TraceError, match=f"forward changes the attribute '{attribute}' at every call"):
        Capture(model, flatten(model, Sample(*ROWS.args)))
