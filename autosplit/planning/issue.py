"""How long a host's threads take to issue kernels, before a plan is made: by the device's figures."""

from __future__ import annotations

import torch

from autosplit.options import Options
from cost_models import registry


def kernel_issue_s(options: Options, lane: int) -> float:
    """Return how long a host thread takes to issue one kernel to a device; 0 where that is not known, as for lanes."""
    device = options.devices[lane]
    if options.machine is not None:
        return options.machine.devices[lane].issue_s
    known = registry.identify(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.issue_s if known is not None else 0.0


def issue_threads(options: Options) -> int:
    """Return how many host threads issue kernels: one on this machine, on paper those of every host."""
    if options.machine is None:
        return 1
    return len(options.machine.host_devices) * options.machine.host.issue_threads
