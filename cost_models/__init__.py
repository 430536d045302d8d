"""What work costs on a machine: devices, links, and models of time; imports neither torch nor autosplit."""

from __future__ import annotations

from cost_models.measured import Measured
from cost_models.protocol import CostModel
from cost_models.registry import device, link, names
from cost_models.roofline import Efficiency, Roofline
from cost_models.specs import DeviceSpec, LinkSpec, Source
from cost_models.work import DType, OpWork

__all__ = [
    "CostModel",
    "DType",
    "DeviceSpec",
    "Efficiency",
    "LinkSpec",
    "Measured",
    "OpWork",
    "Roofline",
    "Source",
    "device",
    "link",
    "names",
]
