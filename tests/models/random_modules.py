"""Random modules for the property tests: a recipe is drawn, a module and its batches are built from it.

Every value in such a module is ``[rows, width]``. A step takes a late value (``near``) and an early one (``far``), so
that long skips, values that many later steps use, and values that nobody uses all occur. No gradient is zero by an
identity (the mean over the batch, for instance, is subtracted by half): a relative metric says nothing about rounding
noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.equality import Batch


@dataclass(frozen=True)
class Step:
    """One step: what it does, which late value and which early value it takes."""

    kind: str
    near: int
    far: int


@dataclass(frozen=True)
class Recipe:
    """Everything that defines a random module."""

    width: int
    steps: tuple[Step, ...]
    inputs: int
    """One to three; those after the first are keyword inputs."""
    outputs: tuple[int, ...]
    form: str
    mean_output: bool
    frozen: int
    """Every ``frozen``-th parameter does not require a gradient; 0: all do."""


@dataclass
class Answer:
    """A dataclass output."""

    last: Tensor
    others: list[Tensor]
    mean: Tensor | None = None
    label: str = "answer"


def _linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


def _layer_norm(width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=0.1)  # a small eps makes the gradient of a norm of a norm rounding noise


class Residual(nn.Module):
    """A submodule with a forward of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _layer_norm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.linear(F.gelu(self.norm(value)))


class Gated(nn.Module):
    """A submodule that unpacks a tuple result and returns two tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.linear(value).chunk(2, dim=-1)
        return left * torch.sigmoid(right), right


def _heads(near: Tensor) -> Tensor:
    heads = near.view(near.shape[0], 2, -1)
    mixed = torch.softmax(heads @ heads.transpose(1, 2), dim=-1) @ heads
    return mixed.transpose(1, 2).reshape(near.shape[0], -1)


def _fold(layer: nn.Module, near: Tensor) -> Tensor:
    rows, width = near.shape
    return torch.tanh(layer(near.reshape(rows * 2, width // 2))).view(rows, -1)


def _count(model: RandomModule, near: Tensor) -> Tensor:
    model.steps += 1
    return near * (1 + 0.1 * model.steps)


def _in_place_add(layer: nn.Module, near: Tensor, far: Tensor) -> Tensor:
    value = layer(near)
    value += far
    return value.mul_(0.5)


def _assign(layer: nn.Module, near: Tensor, far: Tensor) -> Tensor:
    value = layer(near)
    value[:, :2] = far[:, 1:3] * 0.5
    return value


def _gate_without_gradient(near: Tensor, far: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(far)
    return near * gate


@dataclass(frozen=True)
class Operation:
    """How a kind of step computes its values, and the layer that it owns, if any (else it gets an identity)."""

    apply: Callable[[RandomModule, Any, Tensor, Tensor], Tensor | tuple[Tensor, ...]]
    layer: Callable[[int], nn.Module] | None = None


OPERATIONS = {
    "linear": Operation(lambda model, layer, near, far: layer(near), _linear),
    "layer_norm": Operation(lambda model, layer, near, far: layer(near), _layer_norm),
    "tanh": Operation(lambda model, layer, near, far: near.tanh()),
    "gelu": Operation(lambda model, layer, near, far: F.gelu(near)),
    "gelu_module": Operation(lambda model, layer, near, far: layer(near), lambda width: nn.GELU()),
    "relu": Operation(lambda model, layer, near, far: torch.relu(near)),
    "relu_in_place": Operation(lambda model, layer, near, far: F.relu(layer(near), inplace=True), _linear),
    "relu_module": Operation(
        lambda model, layer, near, far: layer(near),
        lambda width: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
    ),
    "residual": Operation(lambda model, layer, near, far: layer(near), Residual),
    "gated": Operation(lambda model, layer, near, far: layer(near), Gated),
    "add": Operation(lambda model, layer, near, far: near + far),
    "add_in_place": Operation(lambda model, layer, near, far: _in_place_add(layer, near, far), _linear),
    "assign": Operation(lambda model, layer, near, far: _assign(layer, near, far), _linear),
    "multiply": Operation(lambda model, layer, near, far: torch.tanh(near) * far),
    "concatenate": Operation(
        lambda model, layer, near, far: layer(torch.cat([near, far], dim=-1)), lambda width: nn.Linear(2 * width, width)
    ),
    "split": Operation(
        lambda model, layer, near, far: torch.split(layer(near), [near.shape[-1]] * 2, dim=-1),
        lambda width: nn.Linear(width, 2 * width),
    ),
    "heads": Operation(lambda model, layer, near, far: _heads(near)),
    "fold": Operation(
        lambda model, layer, near, far: _fold(layer, near), lambda width: nn.Linear(width // 2, width // 2)
    ),
    "constant": Operation(lambda model, layer, near, far: near + torch.linspace(0, 1, near.shape[1], dtype=near.dtype)),
    "fresh": Operation(
        lambda model, layer, near, far: torch.cat([near[:, 1:], near.new_ones(near.shape[0], 1)], dim=1) * 0.5
    ),
    "tied_first": Operation(lambda model, layer, near, far: model.tied_first(near)),
    "tied_second": Operation(lambda model, layer, near, far: torch.tanh(model.tied_second(near))),
    "tied_weight": Operation(lambda model, layer, near, far: F.linear(near, model.tied_first.weight.t())),
    "repeated": Operation(lambda model, layer, near, far: model.repeated(near)),
    "buffer": Operation(lambda model, layer, near, far: near * model.scale + model.offset),
    "counter": Operation(lambda model, layer, near, far: _count(model, near)),
    "no_grad": Operation(lambda model, layer, near, far: _gate_without_gradient(near, far)),
    "detach": Operation(lambda model, layer, near, far: near + torch.tanh(far.detach())),
    "batch_mean": Operation(lambda model, layer, near, far: near - 0.5 * near.mean(0, keepdim=True)),
    "batch_scale": Operation(lambda model, layer, near, far: near * (1 + far.pow(2).mean()).rsqrt()),
}


class RandomModule(nn.Module):
    """The module of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width = recipe.width
        self.recipe = recipe
        self.layers = nn.ModuleList()
        for step in recipe.steps:
            make = OPERATIONS[step.kind].layer
            self.layers.append(nn.Identity() if make is None else make(width))
        self.tied_first = nn.Linear(width, width)
        self.tied_second = nn.Linear(width, width)
        self.tied_second.weight = self.tied_first.weight
        self.repeated = Residual(width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("offset", torch.linspace(-1.0, 1.0, width), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(
        self, first: Tensor, *, second: Tensor | None = None, third: Tensor | None = None, gain: float = 1.0
    ) -> Any:
        values = [first * gain] + [value for value in (second, third) if value is not None]
        for step, layer in zip(self.recipe.steps, self.layers, strict=True):
            near, far = values[-1 - step.near % len(values)], values[step.far % len(values)]
            result = OPERATIONS[step.kind].apply(self, layer, near, far)
            values.extend(result if isinstance(result, tuple) else (result,))
        return self._answer(values)

    def _answer(self, values: list[Tensor]) -> Any:
        last, others = values[-1], [values[-1 - pick % len(values)] for pick in self.recipe.outputs]
        mean = values[-1].pow(2).mean() if self.recipe.mean_output else None
        match self.recipe.form:
            case "tensor":
                return last
            case "tuple":
                return (last, *others) if mean is None else (last, *others, mean)
            case "dict":
                return {"last": last, "mean": mean} | {f"other{index}": value for index, value in enumerate(others)}
            case "nested":
                return {"answers": [last, (others[0], {"mean": mean})], "rest": tuple(others[1:]), "count": len(values)}
        return Answer(last, others, mean)


FORMS = ("tensor", "tuple", "dict", "nested", "dataclass")


def recipes(*, forms: tuple[str, ...] = FORMS, kinds: tuple[str, ...] = tuple(OPERATIONS)) -> st.SearchStrategy[Recipe]:
    step = st.builds(
        Step, kind=st.sampled_from(kinds), near=st.integers(0, 2), far=st.sampled_from((0, 0, 1, 1, 2, 3, 5, 8))
    )
    return st.builds(
        Recipe,
        width=st.sampled_from((4, 6, 8)),
        steps=st.lists(step, min_size=3, max_size=10).map(tuple),
        inputs=st.integers(1, 3),
        outputs=st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
        form=st.sampled_from(forms),
        mean_output=st.booleans(),
        frozen=st.sampled_from((0, 0, 2, 3)),
    )


def build(recipe: Recipe, *, dtype: torch.dtype = torch.float64) -> RandomModule:
    """Return the recipe's module, the same numbers every time."""
    with torch.random.fork_rng():
        torch.manual_seed(len(recipe.steps))
        model = RandomModule(recipe).to(dtype)
    for index, parameter in enumerate(model.parameters(), start=1):
        parameter.requires_grad_(not recipe.frozen or index % recipe.frozen != 0)
    return model


def make_batch(
    recipe: Recipe, *, rows: int, dtype: torch.dtype = torch.float64, seed: int = 0, gradients: bool = True
) -> Batch:
    """Return a batch for the recipe's module; ``gradients`` says whether its inputs require them."""
    generator = torch.Generator().manual_seed(1000 * seed + rows)
    values = [torch.randn(rows, recipe.width, generator=generator, dtype=dtype) for _ in range(recipe.inputs)]
    named = dict(zip(("second", "third"), (value.requires_grad_(gradients) for value in values[1:]), strict=False))
    return Batch((values[0].requires_grad_(gradients),), named | ({"gain": 0.75} if recipe.inputs == 3 else {}))
