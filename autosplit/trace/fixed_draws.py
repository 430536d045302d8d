"""Random operations that always draw the same, whatever the shape: a plain run and microbatches can be compared then.

    bernoulli 1    uniform: the middle    normal: half a deviation above the mean    integers: the lowest
    dropout keeps every value and scales it as ever    permutations keep the order    choices take the likeliest

Private torch interface: ``TorchDispatchMode``, since below autograd is the only place where all random operations pass
(dropout, attention and recurrent layers included); tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FixedDraws(TorchDispatchMode):
    """Replace what random operations draw by constants; ``unknown`` names those for which it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        named = _named(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in _REPLACED:
            return _REPLACED[name](named)
        if "dropout" in named or "dropout_p" in named:
            return func(**{key: 0.0 if key in ("dropout", "dropout_p") else value for key, value in named.items()})
        drawn = func(*args, **kwargs)
        if name.rstrip("_") not in _CONSTANTS:
            self.unknown.add(name)
            return drawn
        return drawn.copy_(torch.as_tensor(_CONSTANTS[name.rstrip("_")](named), device=drawn.device))


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation by name, defaults included."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in func._schema.arguments}


def _dropout(named: dict[str, Any]) -> Any:
    value, share = named["input"], named["p"] if named["train"] is not False else 0.0
    kept = torch.ones_like(value, dtype=torch.bool)
    return value * (1 / (1 - share) if share < 1 else 0.0), kept


def _rrelu(named: dict[str, Any]) -> torch.Tensor:
    value, noise = named["self"], named["noise"]
    slope = (float(named["lower"]) + float(named["upper"])) / 2
    noise.copy_(torch.where(value <= 0, slope, 1.0))
    return value * noise


def _multinomial(named: dict[str, Any]) -> torch.Tensor:
    weights, count = named["self"], named["num_samples"]
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return order[..., :1].expand(*order.shape[:-1], count).clone() if named["replacement"] else order[..., :count]


_REPLACED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "native_dropout": _dropout,
    "rrelu_with_noise": _rrelu,
    "multinomial": _multinomial,
}
_CONSTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bernoulli": lambda named: 1,
    "rand": lambda named: 0.5,
    "rand_like": lambda named: 0.5,
    "randn": lambda named: 0.5,
    "randn_like": lambda named: 0.5,
    "uniform": lambda named: (named["from"] + named["to"]) / 2,
    "normal": lambda named: named["mean"] + 0.5 * named["std"],
    "randint": lambda named: named.get("low", 0),
    "randint_like": lambda named: named.get("low", 0),
    "random": lambda named: named.get("from", 0),
    "randperm": lambda named: torch.arange(named["n"]),
    "exponential": lambda named: 1 / named["lambd"],
    "geometric": lambda named: 1,
    "poisson": lambda named: named["self"].round(),
    "binomial": lambda named: (named["count"] * named["prob"]).round(),
}
