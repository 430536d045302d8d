"""The network between hosts as those who rent them out name it: what one host has, which its devices share."""

from __future__ import annotations

import re

from cost_models.machines import MachineSpec
from cost_models.specs import LinkSpec, Source

_SPEED = re.compile(r"(?:(\d+)\s*[xX×]\s*)?(\d+(?:\.\d+)?)\s*([MGT])(bit|bps|b/s|bit/s|B/s|Bps)")
_PREFIX = {"M": 1e6, "G": 1e9, "T": 1e12}
_FORMS = '"100Gbit", "8x400Gbit" or "12.5GB/s": what one host has, shared by its devices'


def with_network(machine: MachineSpec, speed: str, *, unknown: LinkSpec) -> MachineSpec:
    """Return a machine whose hosts have another network; its name ends with that: ``8x8xH100-SXM5-80GB@400Gbit``.

    Devices of one host share what it has, as all of them send at once. Latencies stay, or are those of ``unknown``.

    Raises:
        ValueError: a text that is no speed, or a machine of one host.
    """
    match = _SPEED.fullmatch(speed.strip())
    if match is None or not float(match[2]):
        raise ValueError(f"the network {speed!r} is no speed; give one such as {_FORMS}")
    if len(machine.host_devices) == 1:
        raise ValueError(
            f"{machine.name} is one host, without a network to another; name several, such as 2x8xH100, or leave the "
            f"network {speed!r} out"
        )
    adapters, unit = int(match[1] or 1), 1 if match[4].startswith("B") else 8
    host_bytes_per_s = adapters * float(match[2]) * _PREFIX[match[3]] / unit
    each, known = max(machine.host_devices), machine.network or unknown
    given = Source(status="prior", text=f"{speed} for each host, as it was asked for, shared by {each} devices")
    sources = {**known.sources, "bandwidth_bytes_per_s": given}
    link = known.model_copy(update={"bandwidth_bytes_per_s": host_bytes_per_s / each, "sources": sources})
    name = f"{machine.name.partition('@')[0]}@{speed.strip()}"
    return machine.model_copy(update={"network": link, "name": name})
