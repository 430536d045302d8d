"""A model, its parts on several ranks without a pipeline, and training that is the same on any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autosplit.distributed.checkpoint import latest, restore, save
from tests.distributed.processes import Pool

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


# -- models and parts ------------------------------------------------------------------------------------------------
class Counting(nn.Linear):
    """Has state that is no tensor."""

    seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "kind": {"name": "counting"}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Plain(nn.Module):
    """A model with a tied weight, buffers, a frozen parameter and state that is no tensor."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(10, width)
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = Counting(width, width)
        self.head = nn.Linear(width, 10)
        self.head.weight = self.embed.weight
        self.second.bias.requires_grad_(False)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.norm.running_mean, self.norm.running_var):
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
        self.norm.num_batches_tracked.fill_(seed)
        self.second.seen = seed


class Part(nn.Module):
    """One rank's part of a model: some children, under the names of the whole; a tied weight is with its first name."""

    def __init__(self, whole: nn.Module, rank: int, size: int) -> None:
        super().__init__()
        children = list(dict(whole.named_children()))
        owners: dict[int, int] = {}
        self.names: list[str] = []
        for name, value in whole.state_dict().items():
            place = value.data_ptr() if isinstance(value, torch.Tensor) and value.numel() else id(value)
            if owners.setdefault(place, children.index(name.partition(".")[0]) * size // len(children)) == rank:
                self.names.append(name)
        object.__setattr__(self, "whole", whole)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self.whole.named_parameters(*args, **kwargs) if name in self.names)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = self.whole.state_dict(*args, **kwargs)
        return {name: state[name] for name in self.names}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        assert list(state_dict) == self.names
        return self.whole.load_state_dict(state_dict, strict=False)


def train(part: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """Take optimizer steps with gradients that depend on the name of a parameter and on the step."""
    for step in steps:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
                gradient = (torch.rand(parameter.shape, generator=generator) - 0.5).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()


def state_of(part: nn.Module) -> dict[str, Any]:
    """Return a copy of a part's state, which goes through a pipe to another process."""
    state = {}
    for name, value in part.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        state[name] = whole.detach().clone().numpy() if isinstance(value, torch.Tensor) else value
    return state


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


def restored_and_trained(folder: Path, kind: str, steps: int, others: int = 0) -> tuple[dict[str, Any], set[float]]:
    """Restore into a training that has gone another way for some steps, and go on; the optimizers' steps in between."""
    part = my_part(seed=2)
    optimizers = OPTIMIZERS[kind](part)
    train(part, optimizers, range(90, 90 + others))
    restore(folder, part, optimizers)
    assert not any("class" in group for one in optimizers for group in one.param_groups)
    begun = {float(state["step"]) for one in optimizers for state in one.state.values() if "step" in state}
    train(part, optimizers, range(latest(folder), steps))
    return state_of(part), begun


def uninterrupted(kind: str, steps: int) -> dict[str, Any]:
    plain = Plain(1)
    train(plain, OPTIMIZERS[kind](plain), range(steps))
    return state_of(plain)


def run(ranks: Pool, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on ranks, or here where there is one."""
    return ranks(size).run(function, *args) if size > 1 else [function(*args)]


def check_same(found: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Check that some parts are a whole: each key once, with the same bits."""
    assert sorted(key for one in found for key in one) == sorted(expected)
    for one in found:
        for key, value in one.items():
            numpy.testing.assert_array_equal(value, expected[key], err_msg=key)
