"""Checkpoints: any number of ranks to any other, all or nothing, and errors that every rank has."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from autosplit.distributed.checkpoint import latest, restore, save
from autosplit.errors import CheckpointError, InputError
from tests.distributed.parts import Part, Plain, state_of, train
from tests.distributed.processes import Pool

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


# -- training on ranks -----------------------------------------------------------------------------------------------
def grouped(part: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters; on some ranks one of them is empty."""
    named = list(part.named_parameters())
    return [
        {"params": [value for name, value in named if name.endswith("weight")], "weight_decay": 0.1, "lr": 0.05},
        {"params": [value for name, value in named if not name.endswith("weight")], "weight_decay": 0.0},
    ]


def two_optimizers(part: nn.Module) -> list[torch.optim.Optimizer]:
    weights, biases = (group["params"] for group in grouped(part))
    made = ((torch.optim.SGD, weights, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, biases, {"lr": 0.01}))
    return [make(parameters, **options) for make, parameters, options in made if parameters]


OPTIMIZERS: dict[str, Make] = {
    "AdamW, groups": lambda part: [torch.optim.AdamW(grouped(part), lr=0.01)],
    "AdamW, named": lambda part: [torch.optim.AdamW(part.named_parameters(), lr=0.01, amsgrad=True)],
    "Adam, lr in a tensor": lambda part: [torch.optim.Adam(part.parameters(), lr=torch.tensor(0.01))],
    "SGD with momentum": lambda part: [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    "SGD": lambda part: [torch.optim.SGD(part.parameters(), lr=0.1)],
    "Adafactor": lambda part: [torch.optim.Adafactor(part.parameters())],
    "two": two_optimizers,
}


def my_part(seed: int) -> nn.Module:
    whole = Plain(seed)
    return Part(whole, dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else whole


def trained_and_saved(folder: Path, kind: str, steps: int) -> None:
    part = my_part(seed=1)
    optimizers = OPTIMIZERS[kind](part)
    train(part, optimizers, range(steps))
    save(folder, steps, part, optimizers)


def restored_and_trained(folder: Path, kind: str, steps: int, *, with_gradients: bool = True) -> dict[str, Any]:
    """Restore into a training that has gone another way, and go on."""
    part = my_part(seed=2)
    optimizers = OPTIMIZERS[kind](part)
    train(part, optimizers, range(90, 92 if with_gradients else 90))
    restore(folder, part, optimizers)
    begun = steps_of(optimizers)
    train(part, optimizers, range(latest(folder), steps))
    return {**state_of(part), "begun": begun}


def steps_of(optimizers: list[torch.optim.Optimizer]) -> set[float]:
    return {float(state["step"]) for one in optimizers for state in one.state.values() if "step" in state}


def uninterrupted(kind: str, steps: int) -> dict[str, Any]:
    plain = Plain(1)
    train(plain, OPTIMIZERS[kind](plain), range(steps))
    return state_of(plain)


def run(ranks: Pool, size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run a function on ranks, or here where there is one."""
    return ranks(size).run(function, *args, **options) if size > 1 else [function(*args, **options)]


def same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    merged = {key: value for one in found for key, value in one.items() if key != "begun"}
    assert sum(len(one) - ("begun" in one) for one in found) == len(expected) == len(merged)
    for key, value in expected.items():
        numpy.testing.assert_array_equal(merged[key], value, err_msg=key)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 1), (1, 4), (2, 2), (1, 1)])
def test_training_goes_on_exactly_on_other_ranks(ranks, tmp_path, kind, before, after):
    run(ranks, before, trained_and_saved, tmp_path, kind, 3)
    found = run(ranks, after, restored_and_trained, tmp_path, kind, 5)
    same(found, uninterrupted(kind, 5))
    assert set().union(*(one["begun"] for one in found)) <= {3.0}
