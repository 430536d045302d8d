"""A model that was built on the meta device gets the values of one part, whatever the parts are."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autosplit.distributed.materialise import initialise, materialise
from autosplit.errors import InputError
from tests.distributed.meta_models import (
    CPU,
    MODELS,
    Drawing,
    TiedByApply,
    every_model,
    on_meta,
    same,
    tensors,
)


@every_model
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_have_the_values_of_the_whole(model, parts):
    whole = tensors(initialise(on_meta(MODELS[model]), 3))
    assert not any(tensor.is_meta for tensor in whole.values())
    distinct = list({id(tensor): name for name, tensor in whole.items()}.values())
    number = {id(whole[name]): random.Random(f"{parts}{name}").randrange(parts) for name in distinct}
    for part in range(parts):
        own = on_meta(MODELS[model])
        before = tensors(own)
        materialise(own, [name for name in whole if number[id(whole[name])] == part], device=CPU, seed=3)
        for name, tensor in tensors(own).items():
            if number[id(whole[name])] == part:
                assert same(tensor, whole[name]), name
                assert tensor.requires_grad == before[name].requires_grad
            else:
                assert tensor is before[name]
        groups = {name: id(tensor) for name, tensor in tensors(own).items()}
        assert len(set(groups.values())) == len({id(tensor) for tensor in before.values()})


@every_model
def test_values_are_distributed_as_those_of_the_constructor(model):
    torch.manual_seed(0)
    built, ours = MODELS[model](), tensors(initialise(on_meta(MODELS[model]), 5))
    buffers = dict(built.named_buffers())
    for name, tensor in tensors(built).items():
        assert tensor.shape == ours[name].shape
        if name in buffers or tensor.unique().numel() == 1:
            assert same(tensor, ours[name]), name
        elif model != "drawing" or "tables.2" not in name:
            one, other = tensor.detach().flatten().double(), ours[name].detach().flatten().double()
            assert ks_2samp(one, other).pvalue > 1e-4, name
    assert list(ours) == list(tensors(built))


def test_each_seed_has_values_of_its_own_and_each_name():
    build = MODELS["encoder"]
    one, other = (tensors(initialise(on_meta(build), seed)) for seed in (0, 1))
    assert not any(same(one[name], other[name]) for name in one if name.endswith("linear1.weight"))
    assert not same(one["layers.0.linear1.weight"], one["layers.1.linear1.weight"])
    assert same(one["layers.0.linear1.weight"], tensors(initialise(on_meta(build)))["layers.0.linear1.weight"])


def test_the_random_state_of_the_caller_is_untouched():
    model = on_meta(Drawing)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    initialise(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]


def test_initialisers_make_their_tensors_on_the_cpu():
    devices = []

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            devices.append(torch.get_default_device())
            nn.init.zeros_(self.table)

    with torch.device("meta"):
        initialise(Table())
    assert devices == [CPU]


def test_attributes_and_classes_of_parameters_are_kept():
    class Sharded(nn.Parameter):
        pass

    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model[0].weight.no_decay = True
    model[0].bias.__class__ = Sharded
    model[0].bias.requires_grad_(False)
    model[1].running_mean.kind = "mean"
    initialise(model)
    assert model[0].weight.no_decay
    assert (type(model[0].weight), type(model[0].bias)) == (nn.Parameter, Sharded)
    assert (model[0].weight.requires_grad, model[0].bias.requires_grad) == (True, False)
    assert model[1].running_mean.kind == "mean"
    assert model[0].weight.is_leaf


def test_tensors_with_values_keep_them():
    model = on_meta(TiedByApply)
    whole = tensors(initialise(on_meta(TiedByApply)))
    materialise(model, ["fc.weight"], device=CPU)
    weight = model.fc.weight
    with torch.no_grad():
        weight.fill_(7.0)
    initialise(model)
    assert model.fc.weight is weight
    assert weight.eq(7.0).all()
    assert same(model.fc.bias, whole["fc.bias"])
    assert model.embed.weight is model.head.weight
    assert same(model.head.weight, whole["head.weight"])


def test_a_tied_tensor_is_given_by_any_of_its_names():
    for name in ("embed.weight", "head.weight"):
        model = on_meta(TiedByApply)
        materialise(model, [name], device=CPU)
        assert model.embed.weight is model.head.weight
        assert not model.head.weight.is_meta


def test_a_model_whose_own_method_does_what_its_constructor_did_can_be_initialised():
    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
            self.init_weights()

        def init_weights(self) -> None:
            nn.init.zeros_(self[1].weight)

    model = initialise(on_meta(Model))
    assert model[1].weight.eq(0).all()
    assert model[0].weight.ne(0).all()


class Chooses(nn.Module):
    """Its constructor calls its method for some choices only, or not with the defaults."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        if how == "all":
            self.init_weights()
        elif how == "norm kept":
            self.init_weights(last=False)

    def init_weights(self, last: bool = True) -> None:
        nn.init.normal_(self.conv.weight, std=9.0)
        if last:
            nn.init.zeros_(self.norm.weight)


@pytest.mark.parametrize(("how", "wide", "zero"), [("all", 1, 1), ("norm kept", 1, 0), ("none", 0, 0)])
def test_a_method_that_the_constructor_does_not_call(how: str, wide: int, zero: int):
    model = initialise(on_meta(lambda: Chooses(how)))
    assert (model.conv.weight.std() > 3) == wide
    assert (model.norm.weight == 1 - zero).all()


@pytest.mark.parametrize("draw", [nn.init.trunc_normal_, nn.init.ones_])
def test_a_method_whose_writes_meta_does_not_count(draw: Any):
    """Truncated draws do nothing there, and copies start anew."""

    class Clones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(64, 64, bias=False)
            copied = draw is nn.init.ones_
            self.layers = nn.ModuleList(copy.deepcopy(layer) if copied else nn.Linear(64, 64) for _ in range(2))
            self.init_weights()

        def init_weights(self) -> None:
            for layer in self.layers:
                draw(layer.weight)

    assert all(layer.weight.abs().max() >= 1 for layer in initialise(on_meta(Clones)).layers)


def _normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 9.0)


class WritesData(nn.Sequential):
    """Writes to weights past their count of changes, itself or by a function."""

    def __init__(self, *, itself: bool) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh())
        if itself:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data[:2] = 0
        else:
            self.apply(_normal)


@pytest.mark.parametrize("itself", [True, False])
def test_a_constructor_that_writes_by_data_is_an_error(itself: bool):
    with pytest.raises(InputError, match=r"written to 0.weight \(of Linear\).*by \.data"):
        initialise(on_meta(lambda: WritesData(itself=itself)))


def test_a_parametrization_without_an_inverse_is_an_error():
    class Symmetric(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.triu() + value.triu(1).mT

    def build() -> nn.Module:
        return parametrize.register_parametrization(nn.Linear(16, 16), "weight", Symmetric())

    with pytest.raises(InputError, match=r"reset_parameters\(\) of 'the model' failed .*right_inverse"):
        initialise(on_meta(build))


PEAK = """
import torch
from torch import nn
from autosplit.distributed.materialise import materialise

def resident(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])
    small = nn.Linear(2, 2)
materialise(small, ["weight", "bias"], device=torch.device("cpu"))
before = resident("VmRSS")
names = [name for name, _ in model.named_parameters() if int(name.split(".")[0]) in (1, 5, 6, 11)]
materialise(model, names, device=torch.device("cpu"))
print((resident("VmHWM") - before) / sum(model.get_parameter(name).nbytes for name in names))
"""


def test_the_peak_of_a_quarter_is_that_quarter():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PEAK]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=root).stdout
    assert 0.9 < float(text) < 1.15
