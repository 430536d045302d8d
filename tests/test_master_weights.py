"""Master weights: the wrapped optimizer's bits in fp32, whatever is saved, loaded, copied or changed in between."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from autosplit import InputError, autosplit
from autosplit.optimizers import MasterWeights

STEPS = 6
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    "adamw, foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3, "initial_accumulator_value": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
}


def net(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model in bf16 with a tied parameter, and one in fp32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(dtype)
    model[2].weight = model[0].weight
    model[1].float()
    return model


def give(parameters: Iterable[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


class Reference:
    """The same training, written out: an optimizer of fp32 copies."""

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.parameters = list(net(dtype=dtype).parameters())
        self.masters = [parameter.detach().float().requires_grad_() for parameter in self.parameters]
        make, options = OPTIMIZERS[name]
        self.optimizer = make(self.masters, **options)

    def step(self, number: int) -> None:
        give(self.parameters, number)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.data.copy_(master)

    def check(self, model: nn.Module) -> None:
        for one, other in zip(model.parameters(), self.parameters, strict=True):
            assert torch.equal(one, other)


def masters(name: str, model: nn.Module) -> MasterWeights:
    make, options = OPTIMIZERS[name]
    return MasterWeights(make, model.parameters(), **options)


def _saved(name: str, model: nn.Module, optimizer: MasterWeights) -> tuple[nn.Module, MasterWeights]:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    state, state_of_optimizer = torch.load(file)
    fresh = net(seed=1)
    again = masters(name, fresh)
    give(fresh.parameters(), 99)
    again.step()
    fresh.load_state_dict(state)
    again.load_state_dict(state_of_optimizer)
    return fresh, again


KEPT: dict[str, Any] = {
    "nothing": lambda _, model, optimizer: (model, optimizer),
    "state dicts": _saved,
    "copies": lambda _, model, optimizer: copy.deepcopy((model, optimizer)),
    "pickles": lambda _, model, optimizer: pickle.loads(pickle.dumps((model, optimizer))),
}


@pytest.mark.parametrize("between", KEPT)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_an_optimizer_of_fp32_copies(name: str, between: str) -> None:
    model, reference = net(), Reference(name)
    optimizer = masters(name, model)
    for step in range(STEPS):
        if step == STEPS // 2:
            model, optimizer = KEPT[between](name, model, optimizer)
        give(model.parameters(), step)
        optimizer.step()
        reference.step(step)
        reference.check(model)
    for parameter, master in zip(model.parameters(), reference.masters, strict=True):
        narrow = parameter.dtype is torch.bfloat16
        assert torch.equal(optimizer.state[parameter]["master"] if narrow else parameter, master)


def test_steps_in_batches_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosplit.optimizers.BATCH_ELEMENTS", 20)
    test_the_bits_are_those_of_an_optimizer_of_fp32_copies("adamw, foreach", "nothing")


def test_what_changes_a_parameter_changes_its_master() -> None:
    model, reference = net(), Reference("adamw")
    optimizer = masters("adamw", model)
    for step in range(STEPS):
        with torch.no_grad():
            for parameters in (model.parameters(), reference.parameters):
                next(iter(parameters))[1] = step
            reference.masters[0][1] = step
        give(model.parameters(), step)
        optimizer.step()
        reference.step(step)
        reference.check(model)


def test_groups_schedulers_closures_and_hooks_are_the_optimizers() -> None:
    model = net(dtype=torch.float16)
    first, *others = model.parameters()
    optimizer = MasterWeights(torch.optim.SGD, [first], lr=0.5)
    optimizer.add_param_group({"params": others, "lr": 0.25})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    before, grads = first.detach().float(), []

    def closure() -> float:
        assert torch.is_grad_enabled()
        give(model.parameters(), 0)
        grads.append(first.grad.float())
        return 0.125

    assert optimizer.step(closure) == 0.125
    scheduler.step()
    assert called == ["before"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
    assert torch.equal(first, (before - 0.5 * grads[0]).half())
    optimizer.zero_grad()
    assert {parameter.grad for parameter in model.parameters()} == {None}
    optimizer.step()  # of nothing


def test_an_optimizer_that_calls_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="LBFGS calls the model itself"):
        MasterWeights(torch.optim.LBFGS, net().parameters())


@pytest.mark.parametrize("how", ["one optimizer", "one per stage"])
def test_a_stream_steps_masters(how: str) -> None:
    """On one stage nothing is late: a stream is the plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()
    plain = copy.deepcopy(model)
    items = [tuple(torch.randn(2, 4, 4).bfloat16()) for _ in range(STEPS)]
    pipe = autosplit(model, devices=["cpu"], chunks=1, sample=items[0][0])
    make = lambda parameters: MasterWeights(torch.optim.SGD, parameters, lr=1e-3, momentum=0.5)  # noqa: E731
    asked = make(pipe.parameters()) if how == "one optimizer" else make
    loss_fn = nn.MSELoss()
    found = [loss.item() for loss in pipe.train_stream(items, loss_fn=loss_fn, optimizer=asked)]
    optimizer, expected = make(plain.parameters()), []
    for item in items:
        optimizer.zero_grad()
        loss = loss_fn(plain(item[0]), item[1])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == expected
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_became_fp32_keeps_its_master() -> None:
    model = net()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-3)
    give(model.parameters(), 0)
    optimizer.step()
    masters = {parameter: optimizer.state[parameter].get("master") for parameter in model.parameters()}
    model.float()
    give(model.parameters(), 1)
    with pytest.raises(InputError, match="has a master weight from when it was in bf16"):
        optimizer.step()
    assert all(optimizer.state[p].get("master") is master for p, master in masters.items())
