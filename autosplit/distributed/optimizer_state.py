"""Optimizer state by the names of parameters, so that it can go to other ranks.

    {"state.fc.weight.exp_avg": ...,          as flatten_optimizer_state_dict=True of torch has it
     "param_groups.fc.weight.lr": ...,        the options of the parameter's group
     "param_groups.fc.weight.class": "Adam",  the optimizer's class
     "param_groups.fc.weight.place": (0, 2)}  the number of the group on the rank that saved, and how many it had

``get_optimizer_state_dict`` of torch would take an optimizer step where none was taken yet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from autosplit.errors import InputError, listed
from autosplit.optimizers import MasterWeights
from autosplit.tensor.part import PARTS
from autosplit.tensor.state import as_part

_NO_OPTIONS = ("params", "param_names")
"""Entries of a parameter group that are no options of the optimizer."""
_OWN = ("class", "place")
"""What is saved beside them."""

Optimizers = Optimizer | Sequence[Optimizer] | None


class GroupKey(NamedTuple):
    """What a group is called on all ranks: the optimizer's class, its number in that class, the group's number."""

    kind: str
    optimizer: int
    group: int


Groups = dict[GroupKey, dict[str, Any]]
"""Options by group."""


class OptimizedParameter(NamedTuple):
    """A parameter of an optimizer: its first name, its group, its number in the optimizer's state dict."""

    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: int
    number: int


def optimized_parameters(model: nn.Module, optimizer: Optimizers) -> list[OptimizedParameter]:
    """Return the parameters of one or several optimizers; InputError where one is not the part's."""
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    names = {parameter: name for name, parameter in reversed(list(model.named_parameters()))}
    rows = [
        OptimizedParameter(names.get(parameter, ""), parameter, each, group, number)
        for each in optimizers
        for group, packed in enumerate(each.state_dict()["param_groups"])
        for parameter, number in zip(each.param_groups[group]["params"], packed["params"], strict=True)
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
    for name, parameter, optimizer, group, number in rows:
        groups = packed[optimizer]["param_groups"]
        options = {**groups[group], "class": _kind(optimizer), "place": (group, len(groups))}
        flat |= {f"param_groups.{name}.{key}": options[key] for key in options if key not in _NO_OPTIONS}
        state = packed[optimizer]["state"].get(number, {})
        flat |= {f"state.{name}.{key}": _of_whole(value, parameter, f"{name}.{key}") for key, value in state.items()}
    if loose := {key: value for d in packed.values() for key, value in d["state"].items() if isinstance(key, str)}:
        flat["state"] = loose
    return flat


def _of_whole(value: Any, parameter: torch.Tensor, name: str) -> Any:
    """Return an entry of a parameter's state; for a parameter that is a part of a whole one, as the same part."""
    shard = PARTS.get(parameter)
    if shard is None or not isinstance(value, torch.Tensor) or value.numel() == 1:
        return value
    check_part(name, value.shape, parameter.shape)
    return as_part(value, shard)


def check_part(name: str, shape: torch.Size, expected: torch.Size) -> None:
    """Raise InputError where a sharded parameter's state is no number and has another shape than the parameter."""
    if shape != expected:
        raise InputError(
            f"{name!r} of the optimizer has shape {tuple(shape)}, and its parameter {tuple(expected)} is shared by "
            "ranks: only state of the parameter's shape can be saved and restored"
        )


def state_dicts(rows: Sequence[OptimizedParameter], flat: Mapping[str, Any]) -> dict[Optimizer, dict[str, Any]]:
    """Return the state dict that each optimizer loads; raise InputError if an optimizer differs from the saved one."""
    saved: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        saved[parameter_of(key)][key.rpartition(".")[2]] = value
    loads = {row.optimizer: {**row.optimizer.state_dict(), "state": {}} for row in rows}
    leaders: dict[tuple[Optimizer, int], str] = {}
    _check_order(rows, {row.name: saved["param_groups", row.name].get("place") for row in rows})
    for name, _, optimizer, group, number in rows:
        leader = leaders.setdefault((optimizer, group), name)
        options, expected = saved["param_groups", name], _options(saved["param_groups", leader])
        if options["class"] != _kind(optimizer):
            raise InputError(
                f"{name!r} was saved with the optimizer {options['class']} and is in one of class "
                f"{_kind(optimizer)}; restore with the former, or without optimizer"
            )
        if _options(options) != expected:
            raise InputError(
                f"{leader!r} and {name!r} are in one parameter group, and were saved with different options: "
                f"{expected} and {_options(options)}; group the parameters as they were"
            )
        loads[optimizer]["state"][number] = saved["state", name]
        _set(loads[optimizer]["param_groups"][group], expected)
    return loads


def _check_order(rows: Sequence[OptimizedParameter], places: Mapping[str, tuple[int, int] | None]) -> None:
    """Raise InputError where groups have changed places; without groups that have no parameters numbers do not tell."""
    for optimizer in {row.optimizer for row in rows}:
        of_optimizer = [row for row in rows if row.optimizer is optimizer]
        for row, other in pairwise(sorted(of_optimizer, key=lambda row: row.group)):
            first, then = places[row.name], places[other.name]
            count = len(optimizer.param_groups)
            if first and then and first[1] == then[1] == count and first[0] > then[0] and row.group < other.group:
                raise InputError(
                    f"{row.name!r} was in group {first[0]} and {other.name!r} in group {then[0]}, and here they are in "
                    f"{row.group} and {other.group}; keep the order of groups, which schedulers count"
                )


def _options(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in saved.items() if key not in _OWN}


def _set(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        device = group[key].device if isinstance(group.get(key), torch.Tensor) else None
        group[key] = value if device is None else value.to(device)


def options_of_groups(loads: Mapping[Optimizer, dict[str, Any]], *, empty: bool = False) -> Groups:
    """Return the options of the groups that have parameters, or of those that are ``empty``."""
    return {
        group_key: {key: value for key, value in group.items() if key not in _NO_OPTIONS}
        for group_key, group in _places(loads)
        if bool(group["params"]) != empty
    }


def groups_of(model: nn.Module, optimizer: Optimizers) -> tuple[Groups, Groups]:
    """Return the options of groups with parameters here, and of those without."""
    states = {row.optimizer: row.optimizer.state_dict() for row in optimized_parameters(model, optimizer)}
    return options_of_groups(states), options_of_groups(states, empty=True)


def empty_everywhere(rows: Sequence[tuple[Groups, Groups]]) -> Groups:
    """Return the options of the groups that are empty on all ranks, by those of full and of empty ones."""
    full = {key for groups, _ in rows for key in groups}
    return {key: options for _, groups in rows for key, options in groups.items() if key not in full}


def fill_empty_groups(loads: Mapping[Optimizer, dict[str, Any]], every: Sequence[Groups]) -> None:
    """Give groups without parameters the options that they have on other ranks: schedulers read and write them too."""
    by_key = {key: options for groups in every for key, options in groups.items()}
    for key, group in _places(loads):
        if not group["params"]:
            _set(group, by_key.get(key, {}))


def _places(loads: Mapping[Optimizer, dict[str, Any]]) -> Iterator[tuple[GroupKey, dict[str, Any]]]:
    counts: Counter[str] = Counter()
    for optimizer, state in loads.items():
        kind = _kind(optimizer)
        counts[kind] += 1
        for number, group in enumerate(state["param_groups"]):
            yield GroupKey(kind, counts[kind], number), group


def _kind(optimizer: Optimizer) -> str:
    """Return the class of an optimizer, and of the one that it wraps."""
    return optimizer.kind if isinstance(optimizer, MasterWeights) else type(optimizer).__name__


def parameter_of(key: str) -> tuple[str, str]:
    """Return section and parameter of a key: ``state.fc.weight.exp_avg`` is of ``("state", "fc.weight")``."""
    section, _, rest = key.partition(".")
    return section, rest.rpartition(".")[0]
