"""A pipe answers for its model: signature, attributes, methods, assignments, and what it refuses."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from autosplit import PipelinedModule, autosplit
from tests.clients.models import batches, llama, split


class Base(nn.Module):
    kinds: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Base.kinds.append(cls)

    def describe(self) -> str:
        return f"{type(self).__name__} of {len(self.layers)}"


class Net(Base):
    """Has names that a pipe has too, private state, properties, and methods that call the model."""

    scale = 1.0
    limit: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.stages = ["a", "b"]
        self.limit = 3
        self._calls = 0
        self.register_buffer("offset", torch.ones(4))

    def forward(self, value: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        value = self.layers(value) * self.scale + self.offset
        return 2 * value if twice else value

    def training_step(self, value: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return self(value).sum() + self.forward(value).sum()

    def names_of_stages(self) -> str:
        return ",".join(self.stages)

    def describe(self) -> str:
        return super().describe() + f", {self.names_of_stages()}"

    def itself(self) -> Net:
        return self

    @property
    def calls(self) -> int:
        return self._calls

    @calls.setter
    def calls(self, count: int) -> None:
        self._calls = count

    @functools.cached_property
    def width(self) -> int:
        return self.layers[0].out_features

    @property
    def failing(self) -> int:
        return self.offset.no_such_name

    @classmethod
    def made(cls) -> type:
        return cls

    @staticmethod
    def seven() -> int:
        return 7

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def pipe(net: Net) -> Any:
    return autosplit(net, devices=2, chunks=2)


def test_attributes_are_the_models(net: Net, pipe: Any) -> None:
    assert pipe.scale == 1.0
    assert pipe.limit == 3, "an attribute of the instance hides the one of its class"
    assert pipe.offset is net.offset
    assert pipe.layers is net.layers
    assert pipe.width == net.width == 4
    assert pipe.seven() == 7
    assert pipe.made() is Net
    assert pipe.stages == (), "what the pipe has itself is the pipe's"


def test_assignments_reach_the_model(net: Net, pipe: Any) -> None:
    value = torch.ones(4, 4)
    first = pipe(value)
    pipe.scale = 2.0
    pipe.calls = 5
    pipe.fresh = "new"
    assert (net.scale, net._calls, net.fresh) == (2.0, 5, "new")
    torch.testing.assert_close(pipe(value), 2 * (first - 1) + 1)
    del pipe.fresh
    assert not hasattr(net, "fresh")
    pipe.offset = torch.zeros(4)
    assert net._buffers["offset"] is pipe.offset
    pipe.layers = nn.Sequential(nn.Linear(4, 2))
    pipe.offset = torch.zeros(2)
    assert torch.equal(pipe(value), net(value))
    pipe.training = False
    assert not net.training


def test_methods_run_through_the_pipe(net: Net, pipe: Any) -> None:
    value = torch.ones(4, 4)
    seen = []
    pipe.register_forward_hook(lambda *_: seen.append("called"))
    torch.testing.assert_close(pipe.training_step(value), 2 * net(value).sum())
    assert pipe.plan is not None
    assert seen.count("called") == 2, (
        "self(...) has hooks, self.forward(...) has none; the model's own call has the same"
    )
    assert pipe.calls == 1
    assert pipe.describe() == "Net of 3, a,b", "methods see the model's attributes, and super() works"
    assert pipe.itself() is pipe
    assert pipe.state_dict().keys() == net.state_dict().keys()
    assert "net.offset" in pipe.state_dict()
    assert Base.kinds == [Net], "the model's class does not learn of a subclass"


def test_a_pipe_is_an_instance_of_the_class_of_its_model(pipe: Any) -> None:
    assert isinstance(pipe, Net)
    assert isinstance(pipe, PipelinedModule)
    assert isinstance(pipe, torch.fx.GraphModule)
    assert pipe.__class__ is Net
    assert {"training_step", "train_step", "limit", "layers"} <= set(dir(pipe))


def test_a_sequential_has_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = autosplit(model, devices=2, chunks=2)
    assert len(pipe) == 2
    assert pipe[0] is model[0]
    assert list(pipe) == list(model)
    pipe[1] = nn.Linear(4, 3)
    assert pipe(torch.ones(4, 4)).shape == (4, 3)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_answer_too(net: Net, pipe: Any, again: Any) -> None:
    value = torch.ones(4, 4)
    pipe.limit = 9
    pipe.training_step(value)
    twin = again(pipe)
    assert type(twin).__name__ == type(pipe).__name__
    assert (twin.limit, twin.calls) == (9, 1)
    assert torch.equal(twin.training_step(value), pipe.training_step(value))
    assert (twin.unsplit() is net) == (again is copy.copy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_pipe_is_the_pipe(net: Net, pipe: Any) -> None:
    value = torch.ones(4, 4)
    compiled = torch.compile(pipe)
    assert torch.equal(compiled(value), net(value))
    compiled(value).sum().backward()
    assert net.layers[0].weight.grad is not None
    assert len(pipe.stages) == 2


def test_a_transformers_model() -> None:
    model = llama()
    pipe = split(model)
    assert isinstance(pipe, PreTrainedModel)
    assert inspect.signature(pipe.forward) == inspect.signature(model.forward)
    assert pipe.config is model.config
    assert (pipe.dtype, pipe.device) == (torch.float32, torch.device("cpu"))
    assert pipe.base_model is model.model
    assert pipe.get_input_embeddings() is model.model.embed_tokens
    assert pipe.num_parameters() == model.num_parameters()
    ids = torch.randint(3, model.config.vocab_size, (2, 5))
    assert torch.equal(pipe.generate(ids, max_new_tokens=3), model.eval().generate(ids, max_new_tokens=3))


def test_a_saved_pretrained_pipe_is_the_saved_model(tmp_path: Any) -> None:
    model, [batch] = llama(), batches(1)
    split(model).save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(again(**batch).logits, model(**batch).logits)
