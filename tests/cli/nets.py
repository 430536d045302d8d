"""Models that the tests of the command line name as ``nets.py:factory``."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Module):
    """Four layers and an optional scale; refuses integers, so that a test sees which dtype arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layers(x)
        return y if scale is None else y * scale


class Tokens(nn.Module):
    """An embedding of 50 rows that reads token ids, and a mask that must be boolean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids) * mask.unsqueeze(-1))


class WithExample(Mlp):
    """Brings its own inputs, as Lightning modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(8, 16)


class Detector(Mlp):
    """Takes a dict, a list of dicts and a pair, as detectors and recurrent models do, and a text and a flag."""

    def forward(
        self,
        batch: dict[str, torch.Tensor],
        targets: list[dict[str, torch.Tensor]],
        pair: tuple[torch.Tensor, torch.Tensor],
        *,
        act: str = "relu",
        flag: bool = True,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        if type(targets) is not list or type(pair) is not tuple:
            raise TypeError(f"a list and a tuple are wanted: {type(targets)}, {type(pair)}")
        y = self.layers(getattr(torch, act)(batch["x"])) * batch["mask"].unsqueeze(-1)
        y = y + targets[0]["boxes"] + targets[1]["boxes"] + pair[0] * pair[1]
        return {"out": y} if flag else y


class AnyKeyword(nn.Module):
    """Takes whatever keyword it is given."""

    def forward(self, **values: torch.Tensor) -> torch.Tensor:
        return values["anything"] * 2


class Routed(nn.Module):
    """Experts that rows are routed to by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            y = y.index_add(0, rows, expert(x[rows]))
        return y


INSTANCE = Mlp()
NUMBER = 3


def make_mlp() -> nn.Module:
    print("a factory that talks")
    return Mlp()


def make_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Mlp()


def make_number() -> int:
    return NUMBER


def make_wide(width: int) -> nn.Module:
    return nn.Linear(width, width)


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


class Gated(Mlp):
    """Takes one of two ways, by the values of its input."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.layers(x) if float(x.sum()) > 0 else self.layers(-x)


def make_broken() -> nn.Module:
    raise RuntimeError("the weights are gone")
