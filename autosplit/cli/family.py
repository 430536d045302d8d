"""``autosplit plan config.json --largest-model``: as many layers of a config's model as fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from autosplit.cli.inputs import ModelSpec, read_config
from autosplit.errors import InputError
from autosplit.planning.explain.changes import least
from autosplit.planning.explain.verdicts import binding
from autosplit.planning.plan.plan import Plan
from autosplit.report.words import format_count

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""What configs call their number of layers."""
_MOST_LAYERS = 4096


def largest_model(spec: ModelSpec, plan_of: Callable[[ModelSpec], Plan]) -> Plan:
    """Return the plan of the config's model with the most layers that surely fits, all else as it is.

    Where not even one layer fits, it is the plan of that. InputError: the config does not say how many layers it has.
    """
    data = read_config(spec.target) | dict(spec.kwargs) if spec.is_config else {}
    name = next((name for name in _LAYERS if isinstance(data.get(name), int)), None)
    if name is None:
        raise InputError(
            f"--largest-model changes the layers of a config ({', '.join(_LAYERS)}); {spec.target} has none"
        )
    plan = cache(lambda layers: plan_of(replace(spec, kwargs={**spec.kwargs, name: layers})))
    tightest = binding(plan(data[name]))
    if tightest is None:
        raise InputError("no capacity is known, so any model fits; give --memory-limit, or devices with a known memory")
    near = max(1, int(data[name] / max(tightest.high_bytes / max(tightest.room_bytes or 1, 1), 1e-3)))
    beyond = least(lambda layers: plan(layers).verdict != "fits", guess=near + 1, low=1, high=_MOST_LAYERS)
    most = max(1, (beyond or _MOST_LAYERS + 1) - 1)
    words = f"the most layers that fit are {most} ({name}), {format_count(plan(most).parameters)} parameters"
    if beyond == 1:
        words = f"not even one layer ({name}) fits"
    return plan(most).model_copy(update={"reasons": (words, *plan(most).reasons)})
