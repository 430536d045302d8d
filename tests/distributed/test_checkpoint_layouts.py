"""A training saved at one layout goes on at any other as if nothing had been: every ordered pair, to the bit.

What is right comes from one process without any file: there a model and its pipe share parameters and optimizer, so one
training can go on in the other. Ranks have the bits of the pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.distributed import checkpoint
from tests.distributed.parts import check_same, run

LAYOUTS = {"plain": 1, "pipe": 1, "pp2": 2, "pp3": 3, "pp4": 4}
"""How many processes each has."""
SAVED, STEPS = 3, 6
WIDTH, WORDS = 8, 11


class Net(nn.Module):
    """Has a tied, a frozen and an unused parameter, running statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.tokens.weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.tokens(tokens).sum(1)
        for place, layer in enumerate(self.layers):
            value = self.drop(torch.tanh(layer(value)))
            if place % 2:
                value = self.norms[place // 2](value)
        return self.head(value)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def grouped(part: nn.Module) -> list[dict[str, Any]]:
    """Three groups of different learning rates, of which ranks may have none of the parameters."""
    named = dict(part.named_parameters())
    tied = [value for name, value in named.items() if name == "tokens.weight"]
    biases = [value for name, value in named.items() if name.endswith("bias")]
    rest = [value for name, value in named.items() if name.endswith(("weight", "spare")) and name != "tokens.weight"]
    return [{"params": rest}, {"params": tied, "lr": 0.02}, {"params": biases, "lr": 0.05, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda part: torch.optim.SGD(grouped(part), lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda part: torch.optim.AdamW(grouped(part), lr=0.01, amsgrad=True),
}


def built(layout: str) -> nn.Module:
    model, sample = Net(), batch_of(0)
    if layout == "plain":
        return model
    devices: Any = "torchrun" if layout.startswith("pp") else ["cpu"] * 2
    return autosplit(model, devices=devices, chunks=3, sample=sample)


def batch_of(position: int) -> Tensor:
    return torch.randint(WORDS, (6, 3), generator=torch.Generator().manual_seed(position))


class Training:
    """What a training script has: optimizer, scheduler, scaler, the position in the data, random state."""

    def __init__(self, part: nn.Module, kind: str) -> None:
        self.part, self.optimizer = part, OPTIMIZERS[kind](part)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.position, self.losses = 0, list[float]()
        self.scaler.scale(torch.ones(()))
        torch.manual_seed(7)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            tokens = batch_of(self.position)
            target = torch.zeros(len(tokens), WORDS)
            self.optimizer.zero_grad()
            if hasattr(self.part, "train_step"):
                loss = self.part.train_step(tokens, target=target, loss_fn=squares)
            else:
                loss = squares(self.part(tokens), target)
                loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            self.scheduler.step()
            self.scaler.update(2.0**self.position)
            self.position += 1

    def save(self, folder: Path) -> None:
        others = {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict()}
        others |= {"random": torch.get_rng_state(), "position": self.position}
        checkpoint.save(folder, self.position, self.part, self.optimizer, others=others)

    def restore(self, folder: Path) -> None:
        others = checkpoint.restore(folder, self.part, self.optimizer)
        self.scheduler.load_state_dict(others["scheduler"])
        self.scaler.load_state_dict(others["scaler"])
        torch.set_rng_state(others["random"])
        self.position = others["position"]

    def state(self) -> dict[str, Any]:
        """Return all that makes up the training, by names of the plain model."""
        names = {value: name for name, value in reversed(list(self.part.named_parameters()))}
        state: dict[str, Any] = {name: value.clone().numpy() for name, value in self.part.state_dict().items()}
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for value in group["params"]:
                state[f"options of {names[value]}"] = repr(options)
                state |= {
                    f"{names[value]}.{key}": torch.as_tensor(entry).clone().numpy()
                    for key, entry in self.optimizer.state[value].items()
                }
        return state

    def common(self) -> list[Any]:
        """Return what every rank has."""
        return [self.losses[-3:], self.scheduler.state_dict(), self.scaler.state_dict(), torch.get_rng_state().tolist()]


def begun_and_saved(layout: str, folder: Path) -> None:
    part = built(layout)
    before = {name: value.clone() for name, value in part.state_dict().items()}
    for kind in OPTIMIZERS:
        part.load_state_dict(before)
        training = Training(part, kind)
        training.train(SAVED)
        training.save(folder / layout / kind)


def resumed(layout: str, folder: Path) -> dict[tuple[str, str], tuple[dict[str, Any], list[Any]]]:
    part, found = built(layout), {}
    for source in LAYOUTS:
        for kind in OPTIMIZERS:
            training = Training(part, kind)
            training.train(1)
            training.restore(folder / source / kind)
            training.train(STEPS - SAVED)
            training.save(folder / f"{source} to {layout}" / kind)
            found[source, kind] = training.state(), training.common()
    return found


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for layout, size in LAYOUTS.items():
        run(ranks, size, begun_and_saved, layout, folder)
    return folder


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, bool, bool], tuple[dict[str, Any], list[Any]]]:
    """Uninterrupted trainings, which are first in the plain model or in its pipe, then in one of both."""
    model, found = Net(), {}
    parts = [model, autosplit(model, devices=["cpu"] * 2, chunks=3, sample=batch_of(0))]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for kind, first, then in product(OPTIMIZERS, (False, True), (False, True)):
        model.load_state_dict(before)
        training = Training(parts[first], kind)
        training.train(SAVED)
        training.part = parts[then]
        training.train(STEPS - SAVED)
        found[kind, first, then] = training.state(), training.common()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_goes_from_every_layout_to_every_other(ranks, saved, expected, layout):
    found = run(ranks, LAYOUTS[layout], resumed, layout, saved)
    for source, kind in found[0]:
        state, common = expected[kind, source != "plain", layout != "plain"]
        check_same([one[source, kind][0] for one in found], state)
        assert [one[source, kind][1] for one in found] == [common] * len(found)
