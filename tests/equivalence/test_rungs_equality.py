"""The rungs of the ladder: which one a model takes, and that it does what the model does on any of them.

The names are those of the traps at which front ends trace with success and are wrong.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit import autosplit
from tests.equivalence.equality import LANES, Batch, assert_equal_runs, forward_backward
from tests.models.own_python import CASES as OWN_PYTHON
from tests.models.own_python import seed
from tests.models.three_layers import WIDTH, Body, Model, Tripled, numbers
from tests.pairwise import pairwise
from tests.runtime.test_batch_norm_statistics import NormAct

pytestmark = pytest.mark.filterwarnings("ignore:.* devices were given")


def without_gradient(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sigmoid(model.a(x))
    return model.c(model.b(x) * scale)


def recomputed(model: Any, x: Tensor) -> Tensor:
    return model.c(checkpoint(lambda h: torch.tanh(model.b(h)), model.a(x), use_reentrant=False))


def moving_average(model: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.a(x))
    if model.training:
        model.buffer_ema = 0.9 * model.buffer_ema + 0.1 * hidden.detach().mean(0)
    return model.c(model.b(hidden) + model.buffer_ema)


def layer_drop(model: Any, x: Tensor) -> Tensor:
    for layer in (model.a, model.b):
        if not model.training or random.random() < 0.5:
            x = torch.tanh(layer(x))
    return model.c(x)


def torch_layer_drop(model: Any, x: Tensor) -> Tensor:
    for layer in (model.a, model.b):
        if not model.training or torch.rand(()).item() < 0.5:
            x = torch.tanh(layer(x))
    return model.c(x)


def python_counter(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return model.c(torch.tanh(model.b(model.a(x)))) * (1.0 if model.calls % 2 else -0.5)


def lazy_cache(model: Any, x: Tensor) -> Tensor:
    if model.cache is None:
        model.cache = torch.linspace(0, 1, WIDTH, dtype=torch.float64)
    return model.c(torch.tanh(model.b(model.a(x)) + model.cache))


def u_net(model: Any, x: Tensor) -> Tensor:
    first = torch.tanh(model.a(x))
    middle = torch.tanh(model.b(first))
    return model.c(torch.cat([first, middle], -1).view(len(x), 2, WIDTH).sum(1) + x)


def root_mask(model: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.a(x))
    if (x > 2.0).any():
        hidden = hidden.clamp(max=0.1)
    return model.c(model.b(hidden))


@dataclass(frozen=True)
class Trap:
    """A model, the rung it takes in training and in eval mode, and how its batches are made."""

    build: Callable[[], nn.Module]
    training: str
    evaluation: str
    batch: Callable[[int, int], tuple[Any, ...]] = lambda count, seed: (numbers(count, WIDTH, seed=seed),)


def of(body: Body, training: str = "recorded", evaluation: str = "recorded", **parts: Any) -> Trap:
    return Trap(partial(Model, body, **parts), training, evaluation)


def off_graph(name: str) -> Trap:
    """Return a trap of a model that no graph can follow in either mode."""
    case = OWN_PYTHON[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return case.model().double()

    return Trap(build, TREE, TREE, case.batch)


TREE = "module tree"
TRAPS = {
    "1 autograd function": of(lambda m, x: m.c(Tripled.apply(m.b(torch.tanh(m.a(x)))))),
    "2 no_grad block": of(without_gradient),
    "3 checkpoint": of(recomputed),
    "4 buffer assignment": of(moving_average, buffer_ema=lambda: torch.zeros(WIDTH, dtype=torch.float64)),
    "5 batch norm act": of(lambda m, x: m.c(m.b(m.norm(m.a(x)))), norm=lambda: NormAct(WIDTH)),
    "6 layer drop, Python": of(layer_drop, TREE),
    "6 layer drop, torch": of(torch_layer_drop, TREE),
    "7 Python counter": of(python_counter, calls=0),
    "7 lazy cache": of(lazy_cache, cache=None),
    "8 U-Net": of(u_net),
    "value read at the root": of(root_mask),
    "value-dependent loop": off_graph("early exit"),
    "numpy": off_graph("numpy"),
    "list of images": off_graph("detector"),
}


def on_tree(pipe: Any) -> bool:
    """Tell whether the pipe's last call ran the model's own Python."""
    return "module_tree" in pipe.code


def twins(name: str, training: bool, **options: Any) -> tuple[nn.Module, Any]:
    plain = TRAPS[name].build().train(training)
    return plain, autosplit(copy.deepcopy(plain), **{"devices": ["cpu"] * 2, "chunks": 3, **options})


def run(module: nn.Module, args: tuple[Any, ...], number: int) -> Any:
    seed(number)
    return forward_backward(module, Batch(args))


NORM = "5 batch norm act"
"""In training each microbatch is normalised by itself: the tests of batch norm say how that is compared."""


@pairwise(name=[name for name in TRAPS if name != NORM], mode=("train", "eval"), lanes=LANES)
def test_a_trap_takes_its_rung_and_equals_the_plain_model(name: str, mode: str, lanes: str) -> None:
    trap, rung = TRAPS[name], TRAPS[name].training if mode == "train" else TRAPS[name].evaluation
    plain, pipe = twins(name, mode == "train", lanes=lanes)
    for number, count in enumerate((7, 7, 4, 10)):
        args = trap.batch(count, number)
        assert_equal_runs(run(pipe, args, number), run(plain, args, number))
        assert on_tree(pipe) == (rung == TREE)
    assert pipe.plan.rung == rung
    for key, value in vars(plain).items():
        if isinstance(value, int) and key != "training":
            assert getattr(pipe.unsplit(), key) == value


@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("name", ["6 layer drop, Python", "6 layer drop, torch"])
def test_one_plan_serves_the_tree_in_training_and_the_recording_in_eval(name: str, first: str) -> None:
    plain, pipe = twins(name, first == "train")
    rungs = []
    for number in range(5):
        args = TRAPS[name].batch(7, number)
        assert_equal_runs(run(pipe, args, number), run(plain, args, number))
        rungs.append(on_tree(pipe))
        plain.train(not plain.training)
        pipe.train(plain.training)
    assert rungs == [(number % 2 == 0) == (first == "train") for number in range(5)]
    assert pipe.plan.rung == (TREE if first == "train" else "recorded")
    assert len(pipe.plan.stages) == 2


@pytest.mark.parametrize(("name", "width"), [("value-dependent loop", 3), ("6 layer drop, Python", WIDTH)])
def test_train_step_on_the_tree(name: str, width: int) -> None:
    plain, pipe = twins(name, True)
    target = numbers(7, width, seed=5, gradient=False)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (plain, pipe)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        args = [x.detach() for x in TRAPS[name].batch(7, number)]
        state = random.getstate()
        loss = pipe.train_step(*args, target=target, loss_fn=nn.MSELoss())
        after = random.getstate()
        random.setstate(state)
        expected = F.mse_loss(plain(*args), target)
        expected.backward()
        assert random.getstate() == after
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


def rescaled_once(model: Any, x: Tensor) -> Tensor:
    """Changes a weight in place at the first call in eval mode, and back at the first in training, as RWKV does."""
    if model.scaled == model.training:
        with torch.no_grad():
            model.b.weight.mul_(2.0 if model.training else 0.5)
        model.scaled = not model.training
    return model.c(torch.tanh(model.b(model.a(x))))


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_that_forward_changes_is_as_the_model_leaves_it(training: bool) -> None:
    plain = Model(rescaled_once, scaled=False).train(training)
    args = (numbers(7, WIDTH, gradient=False),)
    weight = plain.b.weight.detach().clone()
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3, sample=args[0])
    assert torch.equal(pipe.unsplit().b.weight, weight)
    pipe = autosplit(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    for number in range(6):
        assert_equal_runs(run(pipe, args, number), run(plain, args, number))
        assert torch.equal(pipe.state_dict()["b.weight"], plain.b.weight)
        if number % 2:
            plain.train(not plain.training)
            pipe.train(plain.training)
