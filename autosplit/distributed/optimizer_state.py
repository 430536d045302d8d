"""Optimizer state by the names of parameters, so that it can go to other ranks.

    {"state.fc.weight.exp_avg": ...,          as flatten_optimizer_state_dict=True of torch has it
     "param_groups.fc.weight.lr": ...,        the options of the parameter's group
     "param_groups.fc.weight.class": "Adam"}  and the optimizer's class

``get_optimizer_state_dict`` of torch would take an optimizer step where none was taken yet.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autosplit.errors import InputError

_NO_OPTIONS = ("params", "param_names")
"""Entries of a parameter group that are no options of the optimizer."""
_SHOWN = 3
"""How many entries of a list an error names."""

Optimizers = Optimizer | Sequence[Optimizer] | None


class OptimizedParameter(NamedTuple):
    """A parameter of an optimizer: its first name, its group, its number in the optimizer's state dict."""

    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: int
    number: int

    def is_in(self, flat: Mapping[str, Any]) -> bool:
        """Tell whether the parameter was an optimizer's when it was saved."""
        return f"param_groups.{self.name}.class" in flat


def optimizer_list(optimizer: Optimizers) -> list[Optimizer]:
    """Return one or several optimizers, or none, as a list."""
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def optimized_parameters(part: nn.Module, optimizers: Sequence[Optimizer]) -> list[OptimizedParameter]:
    """Return the parameters of optimizers; InputError where one is not the part's."""
    names: dict[int, str] = {}
    for name, parameter in part.named_parameters():
        names.setdefault(id(parameter), name)
    rows = [
        OptimizedParameter(names.get(id(parameter), ""), parameter, optimizer, group, number)
        for optimizer in optimizers
        for group, packed in enumerate(optimizer.state_dict()["param_groups"])
        for parameter, number in zip(optimizer.param_groups[group]["params"], packed["params"], strict=True)
    ]
    if foreign := [list(row.parameter.shape) for row in rows if not row.name]:
        raise InputError(
            f"{len(foreign)} of {len(rows)} parameters of the optimizer are not the part's, of shapes "
            f"{listed(foreign)}; make the optimizer of part.parameters()"
        )
    return rows


def flattened(part: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return state and options of optimizers by the names of their parameters; InputError where some cannot be."""
    packed = {optimizer: optimizer.state_dict() for optimizer in optimizers}
    flat: dict[str, Any] = {}
    for name, _, optimizer, group, number in optimized_parameters(part, optimizers):
        options = {**packed[optimizer]["param_groups"][group], "class": type(optimizer).__name__}
        flat |= {f"param_groups.{name}.{key}": options[key] for key in options if key not in _NO_OPTIONS}
        flat |= {f"state.{name}.{key}": value for key, value in packed[optimizer]["state"].get(number, {}).items()}
    bound = [key for key, value in flat.items() if _is_nested(value)]
    bound += [f"state.{key}" for one in packed.values() for key in one["state"] if not isinstance(key, int)]
    if bound:
        raise InputError(
            f"an optimizer's state cannot go to another rank where it is nested or of no single parameter: "
            f"{listed(bound)}; save optimizer.state_dict() in `others` instead, under a key per rank"
        )
    return flat


def _is_nested(value: Any) -> bool:
    """Tell whether DCP would spread a value over several keys."""
    if isinstance(value, list):
        return any(isinstance(entry, torch.Tensor | Mapping | list) for entry in value)
    return isinstance(value, Mapping)


def state_dicts(rows: Sequence[OptimizedParameter], flat: Mapping[str, Any]) -> dict[Optimizer, dict[str, Any]]:
    """Return what each optimizer has to load; InputError where one is not as the saved one."""
    values: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        values[owner(key)][key.rpartition(".")[2]] = value
    found = {one: {**one.state_dict(), "state": {}} for one in dict.fromkeys(row.optimizer for row in rows)}
    leaders: dict[tuple[Optimizer, int], str] = {}
    for name, _, optimizer, group, number in rows:
        options, leader = values["param_groups", name], leaders.setdefault((optimizer, group), name)
        if options["class"] != type(optimizer).__name__:
            raise InputError(
                f"{name!r} was saved with the optimizer {options['class']} and is in one of class "
                f"{type(optimizer).__name__}; restore with the former, or without optimizer"
            )
        if digest(options) != digest(values["param_groups", leader]):
            raise InputError(
                f"{leader!r} and {name!r} are in one parameter group, and were saved with different options: "
                f"{values['param_groups', leader]} and {options}; group the parameters as they were"
            )
        found[optimizer]["state"][number] = values["state", name]
    for (optimizer, group), leader in leaders.items():
        live = found[optimizer]["param_groups"][group]
        for key, value in values["param_groups", leader].items():
            live[key] = value.to(live[key].device) if isinstance(live.get(key), torch.Tensor) else value
        del live["class"]
    return found


def owner(key: str) -> tuple[str, str]:
    """Return section and parameter of a key: ``state.fc.weight.exp_avg`` is of ``("state", "fc.weight")``."""
    section, _, rest = key.partition(".")
    return section, rest.rpartition(".")[0]


def digest(value: Any) -> bytes:
    """Return a digest of a value: equal for equal values, however they came to be."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        flat = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = f"{local.dtype}{list(local.shape)}".encode() + flat.numpy().tobytes()
    elif isinstance(value, Mapping):
        data = b"".join(sorted(digest(key) + digest(entry) for key, entry in value.items()))
    elif isinstance(value, list | tuple):
        data = b"".join(map(digest, value))
    else:
        data = pickle.dumps(value)
    return hashlib.sha256(type(value).__name__.encode() + data).digest()


def listed(entries: Sequence[Any]) -> str:
    """Return the first entries as text, and how many more there are."""
    more = len(entries) - _SHOWN
    return ", ".join(map(str, entries[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
