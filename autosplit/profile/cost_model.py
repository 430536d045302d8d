"""The cost model that a name or a file stands for."""

from __future__ import annotations

import json
from pathlib import Path

import cost_models
from autosplit.errors import DeviceError
from cost_models.calibration import Calibrated
from cost_models.protocol import CostModel
from cost_models.roofline import Roofline
from cost_models.specs import DeviceSpec


def cost_model_of(device: str | Path | DeviceSpec) -> CostModel:
    """Return the cost model of a device, by name too, of a device file, or what a calibration file fitted.

    Files end in ``.json``; a calibration is what ``autosplit profile --calibrate`` writes. Raises DeviceError for a
    name that is not known, with the nearest ones, and for a file that describes neither.
    """
    if isinstance(device, DeviceSpec):
        return Roofline(device)
    try:
        return Calibrated.load(device) if _is_calibration(device) else Roofline(cost_models.device(device))
    except ValueError as error:
        raise DeviceError(str(error)) from error


def _is_calibration(device: str | Path) -> bool:
    """Tell whether a file holds fitted curves, however broken, rather than a device's figures."""
    if not str(device).endswith(".json"):
        return False
    try:
        content = json.loads(Path(device).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and not {"curves", "stamp"}.isdisjoint(content)
