"""A training saved at one layout goes on at any other as if nothing had been: every ordered pair, to the bit.

What is right comes from one process without any file: there a model and its pipe share parameters and optimizer, so one
training can go on in the other. Ranks have the bits of the pipe; replicas, whose batch norm sees other microbatches,
have their own, and so have ranks that share tensors, which add up in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autosplit import autosplit
from autosplit.distributed import checkpoint
from autosplit.tensor.part import PARTS
from autosplit.tensor.state import TensorPart, as_part
from tests.distributed.parts import check_same, run
from tests.distributed.replicas import whole as whole_state

LAYOUTS = {"plain": 1, "pipe": 1, "pp2": 2, "pp3": 3, "pp4": 4, "dp2 pp2": 4, "fsdp2 pp2": 4, "pp2 tp2": 4, "tp4": 4}
LAYOUTS |= {"fsdp2 tp2": 4}
"""How many processes each has."""
REPLICAS = {"dp2 pp2", "fsdp2 pp2"}
"""Those with two replicas, which have the same bits."""
COLUMNS = {"pp2 tp2": {"pp": 2, "tp": 2}, "tp4": {"pp": 1, "tp": 4}, "fsdp2 tp2": {"dp": 2, "tp": 2}}
"""The degrees of those whose ranks share tensors."""
PIPELINES = dict.fromkeys(REPLICAS, ((0, 1), (2, 3))) | {"pp2 tp2": ((0, 2), (1, 3))}
PIPELINES |= dict.fromkeys(("tp4", "fsdp2 tp2"), ((0,), (1,), (2,), (3,)))
"""The ranks that have a model together."""
ALL = slice(None)
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
    model, sample = Net(), batch_of(0, rows_of(layout))
    if layout == "plain":
        return model
    if layout in REPLICAS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        parallelize = "fsdp" if layout == "fsdp2 pp2" else None
        return autosplit(model, mesh=mesh, chunks=3, sample=sample, parallelize=parallelize)
    if layout in COLUMNS:
        degrees = COLUMNS[layout]
        mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        return autosplit(model, mesh=mesh, chunks=3, sample=sample, parallelize="fsdp" if "dp" in degrees else None)
    devices: Any = "torchrun" if layout.startswith("pp") else ["cpu"] * 2
    return autosplit(model, devices=devices, chunks=3, sample=sample)


def rows_of(layout: str) -> slice:
    """Return this rank's rows of the batch."""
    replicas = layout in {*REPLICAS, "fsdp2 tp2"}
    first = 6 * (dist.get_rank() // 2) if replicas else 0
    return slice(first, first + 6) if replicas else slice(None)


def batch_of(position: int, rows: slice = ALL) -> Tensor:
    return torch.randint(WORDS, (12, 3), generator=torch.Generator().manual_seed(position))[rows]


def whole_entry(entry: Tensor, parameter: Tensor) -> Tensor:
    """Return an entry of an optimizer's state, whole where it belongs to a part of a parameter."""
    part = as_part(entry, PARTS.get(parameter) if entry.shape == parameter.shape else None)
    return part.part.whole(part) if isinstance(part, TensorPart) else entry.clone()


class Training:
    """What a training script has: optimizer, scheduler, scaler, the position in the data, random state."""

    def __init__(self, part: nn.Module, kind: str, rows: slice = ALL) -> None:
        self.part, self.optimizer, self.rows = part, OPTIMIZERS[kind](part), rows
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.position, self.losses = 0, list[float]()
        self.scaler.scale(torch.ones(()))
        torch.manual_seed(7)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            tokens = batch_of(self.position, self.rows)
            target = torch.zeros(len(tokens), WORDS)
            self.optimizer.zero_grad()
            if hasattr(self.part, "train_step"):
                loss = self.part.train_step(tokens, target=target, loss_fn=squares, loss_reduction="mean")
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
        state: dict[str, Any] = {name: whole(value) for name, value in whole_state(self.part.state_dict()).items()}
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for value in group["params"]:
                state[f"options of {names[value]}"] = repr(options)
                state |= {
                    f"{names[value]}.{key}": whole(whole_entry(torch.as_tensor(entry), value))
                    for key, entry in self.optimizer.state[value].items()
                }
        return state

    def common(self) -> list[Any]:
        return [self.losses[-3:], self.scheduler.state_dict(), self.scaler.state_dict(), torch.get_rng_state().tolist()]


def whole(value: Tensor) -> Any:
    """Return a copy of a tensor, of all its shards."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone().numpy()


State = dict[str, Any]
Found = dict[Any, tuple[State, State, list[Any]]]
"""The state where a training was saved or restored, and at its end, with what every rank has then."""


def begun_and_saved(layout: str, folder: Path) -> Found:
    part, found = built(layout), {}
    before = {name: value.clone() for name, value in part.state_dict().items()}
    for kind in OPTIMIZERS:
        part.load_state_dict(before)
        training = Training(part, kind, rows_of(layout))
        training.train(SAVED)
        training.save(folder / layout / kind)
        state = training.state()
        training.train(STEPS - SAVED)
        found[kind] = state, training.state(), training.common()
    return found


def resumed(layout: str, folder: Path) -> Found:
    part, found = built(layout), {}
    for source, kind in product(LAYOUTS, OPTIMIZERS):
        training = Training(part, kind, rows_of(layout))
        training.train(1)
        training.restore(folder / source / kind)
        state = training.state()
        training.train(STEPS - SAVED)
        training.save(folder / f"{source} to {layout}" / kind)
        found[source, kind] = state, training.state(), training.common()
    return found


def together(layout: str, found: list[Found]) -> Found:
    """Return what the ranks of one pipeline found together, in which all agree; replicas and columns have the same."""
    every = [[found[rank] for rank in ranks] for ranks in PIPELINES.get(layout, (range(len(found)),))]
    for key, replica in product(found[0], every):
        assert all(one[key][2] == found[0][key][2] for one in replica)
        for place in (0, 1):
            check_same([one[key][place] for one in replica], merged([one[key][place] for one in every[0]]))
    return {k: (*(merged([one[k][n] for one in every[0]]) for n in (0, 1)), found[0][k][2]) for k in found[0]}


def merged(states: list[State]) -> State:
    return {key: value for state in states for key, value in state.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def saved(ranks, folder) -> dict[str, Found]:
    return {layout: together(layout, run(ranks, n, begun_and_saved, layout, folder)) for layout, n in LAYOUTS.items()}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, bool, bool], tuple[State, list[Any]]]:
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
def test_a_training_goes_from_every_layout_to_every_other(ranks, saved, folder, expected, layout):
    found = together(layout, run(ranks, LAYOUTS[layout], resumed, layout, folder))
    for (source, kind), (begun, ended, common) in found.items():
        check_same([begun], saved[source][kind][0])
        right = expected[kind, source != "plain", layout != "plain"]
        alike = {source, layout} <= REPLICAS or source == layout in COLUMNS
        if alike:
            right = saved[layout if layout in COLUMNS else "dp2 pp2"][kind][1:]
        if alike or not PIPELINES.keys() & {source, layout}:
            check_same([ended], right[0])
            assert common == right[1]
        else:
            assert common[1:] == right[1][1:]
