"""Layers that share a weight, told from the model alone: most often they have to be entered, as its uses will show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from autosplit.trace.recording import Call
from autosplit.trace.scope import Scope, has_hooks

_ONE_CALL = (nn.Linear, nn.Embedding)
"""Layers whose forward is one call that reads the weight."""


def tied_layers(model: nn.Module, scope: Scope) -> dict[str, str]:
    """Map layers whose weight another layer has too to the weight's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        plain = type(module) in _ONE_CALL and getattr(module, "max_norm", None) is None
        if plain and path and path not in scope.atoms and not has_hooks(module):
            owners[id(module.weight)].append(path)
    return {path: names[key] for key, paths in owners.items() if len(paths) > 1 for path in paths}


def all_used(ties: Mapping[str, str], calls: Sequence[Call]) -> bool:
    """Tell whether each of the layers, entered, was called, and its weight is used more than once.

    So it is then where they are leaves, each call of theirs being one call either way.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        for name in dict.fromkeys(call.reads):
            users[name].append(call.module)
    return all(path in users[name] and len(users[name]) > 1 for path, name in ties.items())
