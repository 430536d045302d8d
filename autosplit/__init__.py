"""Split any PyTorch model over several devices and train it as a pipeline, exactly as it trains on one."""

from __future__ import annotations

from autosplit.api import autosplit
from autosplit.errors import (
    AutosplitError,
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
from autosplit.planning.plan import Plan
from autosplit.verification import Verification, verify

__all__ = [
    "AutosplitError",
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
    "verify",
]
