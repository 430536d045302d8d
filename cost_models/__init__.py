"""What work costs on a machine: devices, links, machines, and models of time; imports neither torch nor autosplit.

Three questions, three kinds of object, all frozen; ``README.md`` beside this file has examples that run.

**What is the machine?** ``device("H100-SXM5-80GB")`` gives a ``DeviceSpec``: memory, bandwidth, peaks per arithmetic,
overheads. ``machine("8xH100-SXM5-80GB")``, ``machine("2xA100-SXM4-80GB+2xL4-24GB")`` or a list of names gives a
``MachineSpec``: devices and, by ``machine.link(i, j)``, the ``LinkSpec`` between any two. ``names()`` and
``machine_names()`` list what comes with the package; wherever a name is accepted, the path of a JSON file is too.
Every figure has a ``Source`` with a status: measured, datasheet, recalled or prior.

**What is the work?** An ``OpWork``: class of operation, FLOPs, bytes, arithmetic, kernels.

**How long does it take?** Anything with ``seconds(work)`` is a ``CostModel``: ``Roofline`` from a device's figures,
``Measured`` from a table with another model for what it lacks, ``Calibrated`` from curves fitted to measurements.

Units are in the names, and SI: seconds, bytes, FLOP per second; a bandwidth of 1 GB/s is 1e9, and memory is what the
driver reports. Bad input is a ``ValueError`` that says what was given, what is allowed, and the way out.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cost_models.calibration import Calibrated, Curve, Measured, Stamp
    from cost_models.machines import HostSpec, MachineSpec, PairLink
    from cost_models.registry import device, find, identify, link, machine, machine_names, names
    from cost_models.roofline import Efficiency, Roofline
    from cost_models.specs import DeviceSpec, LinkSpec, Source
    from cost_models.work import KINDS, CostModel, DType, OpWork

__all__ = [
    "KINDS",
    "Calibrated",
    "CostModel",
    "Curve",
    "DType",
    "DeviceSpec",
    "Efficiency",
    "HostSpec",
    "LinkSpec",
    "MachineSpec",
    "Measured",
    "OpWork",
    "PairLink",
    "Roofline",
    "Source",
    "Stamp",
    "device",
    "find",
    "identify",
    "link",
    "machine",
    "machine_names",
    "names",
]

_HOMES = {
    "calibration": ("Calibrated", "Curve", "Measured", "Stamp"),
    "machines": ("HostSpec", "MachineSpec", "PairLink"),
    "registry": ("device", "find", "identify", "link", "machine", "machine_names", "names"),
    "roofline": ("Efficiency", "Roofline"),
    "specs": ("DeviceSpec", "LinkSpec", "Source"),
    "work": ("KINDS", "CostModel", "DType", "OpWork"),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: what is behind them takes longer than the rest of a program."""
    from importlib import import_module

    for home, inside in _HOMES.items():
        if name in inside:
            value: object = getattr(import_module(f"cost_models.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'cost_models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
