"""Optimizer state by the names of parameters, so that it can go to other ranks.

    {"state.fc.weight.exp_avg": ...,          as flatten_optimizer_state_dict=True of torch has it
     "param_groups.fc.weight.lr": ...,        the options of the parameter's group
     "param_groups.fc.weight.class": "Adam"}  and the optimizer's class

``get_optimizer_state_dict`` of torch would take an optimizer step where none was taken yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from autosplit.errors import InputError, listed

_NO_OPTIONS = ("params", "param_names")
"""Entries of a parameter group that are no options of the optimizer."""

Optimizers = Optimizer | Sequence[Optimizer] | None


class OptimizedParameter(NamedTuple):
    """A parameter of an optimizer: its first name, its group, its number in the optimizer's state dict."""

    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: int
    number: int


def optimized_parameters(part: nn.Module, optimizer: Optimizers) -> list[OptimizedParameter]:
    """Return the parameters of one or several optimizers; InputError where one is not the part's."""
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    names = {parameter: name for name, parameter in reversed(list(part.named_parameters()))}
    rows = [
        OptimizedParameter(names.get(parameter, ""), parameter, one, group, number)
        for one in optimizers
        for group, packed in enumerate(one.state_dict()["param_groups"])
        for parameter, number in zip(one.param_groups[group]["params"], packed["params"], strict=True)
    ]
    if foreign := [list(row.parameter.shape) for row in rows if not row.name]:
        raise InputError(
            f"{len(foreign)} of {len(rows)} parameters of the optimizer are not the part's, of shapes "
            f"{listed(foreign)}; make the optimizer of part.parameters()"
        )
    return rows


def flattened(rows: Sequence[OptimizedParameter]) -> dict[str, Any]:
    """Return state and options of optimizers by the names of their parameters; what is of none, nested."""
    packed = {row.optimizer: row.optimizer.state_dict() for row in rows}
    flat: dict[str, Any] = {}
    for name, _, optimizer, group, number in rows:
        options = {**packed[optimizer]["param_groups"][group], "class": type(optimizer).__name__}
        flat |= {f"param_groups.{name}.{key}": options[key] for key in options if key not in _NO_OPTIONS}
        flat |= {f"state.{name}.{key}": value for key, value in packed[optimizer]["state"].get(number, {}).items()}
    if loose := {key: value for one in packed.values() for key, value in one["state"].items() if isinstance(key, str)}:
        flat["state"] = loose
    return flat


def state_dicts(rows: Sequence[OptimizedParameter], flat: Mapping[str, Any]) -> dict[Optimizer, dict[str, Any]]:
    """Return what each optimizer has to load; InputError where one is not as the saved one."""
    saved: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        saved[parameter_of(key)][key.rpartition(".")[2]] = value
    loads = {row.optimizer: {**row.optimizer.state_dict(), "state": {}} for row in rows}
    leaders: dict[tuple[Optimizer, int], str] = {}
    for name, _, optimizer, group, number in rows:
        leader = leaders.setdefault((optimizer, group), name)
        options, expected = saved["param_groups", name], saved["param_groups", leader]
        if options["class"] != type(optimizer).__name__:
            raise InputError(
                f"{name!r} was saved with the optimizer {options['class']} and is in one of class "
                f"{type(optimizer).__name__}; restore with the former, or without optimizer"
            )
        if options != expected:
            raise InputError(
                f"{leader!r} and {name!r} are in one parameter group, and were saved with different options: "
                f"{expected} and {options}; group the parameters as they were"
            )
        loads[optimizer]["state"][number] = saved["state", name]
        live = loads[optimizer]["param_groups"][group]
        for key in options.keys() - {"class"}:
            device = live[key].device if isinstance(live.get(key), torch.Tensor) else None
            live[key] = options[key] if device is None else options[key].to(device)
    return loads


def parameter_of(key: str) -> tuple[str, str]:
    """Return section and parameter of a key: ``state.fc.weight.exp_avg`` is of ``("state", "fc.weight")``."""
    section, _, rest = key.partition(".")
    return section, rest.rpartition(".")[0]
