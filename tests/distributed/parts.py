"""A model and its parts on several ranks, without a pipeline; training that is the same on any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


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
                parameter.grad = torch.rand(parameter.shape, generator=generator) - 0.5
        for optimizer in optimizers:
            optimizer.step()


def state_of(part: nn.Module) -> dict[str, Any]:
    """Return a copy of a part's state, which goes through a pipe to another process."""
    return {
        name: value.detach().clone().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in part.state_dict().items()
    }
