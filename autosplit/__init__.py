"""Split any PyTorch model over several devices and train it as a pipeline, exactly as it trains on one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autosplit.version import __version__ as __version__

if TYPE_CHECKING:
    from autosplit.api import autosplit, plan
    from autosplit.distributed.materialise import initialise
    from autosplit.errors import (
        AutosplitError,
        CheckpointError,
        DeviceError,
        InfeasibleError,
        InputError,
        PlanError,
        ProfileError,
        ScheduleError,
        TraceError,
    )
    from autosplit.options import Sample
    from autosplit.pipelined import PipelinedModule
    from autosplit.planning.plan.plan import Plan
    from autosplit.verification import Verification, verify

__all__ = [
    "AutosplitError",
    "CheckpointError",
    "DeviceError",
    "InfeasibleError",
    "InputError",
    "PipelinedModule",
    "Plan",
    "PlanError",
    "ProfileError",
    "Sample",
    "ScheduleError",
    "TraceError",
    "Verification",
    "autosplit",
    "initialise",
    "plan",
    "verify",
]

_PLACES = {
    "PipelinedModule": "pipelined",
    "Plan": "planning.plan.plan",
    "Sample": "options",
    "Verification": "verification",
    "autosplit": "api",
    "initialise": "distributed.materialise",
    "plan": "api",
    "verify": "verification",
}
"""Where the names are that are no errors; they are imported when first asked for, so that the command line is quick."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
