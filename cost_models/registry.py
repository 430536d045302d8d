"""Devices by name: the ones that come with the package, and the user's own JSON files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from cost_models.specs import DeviceSpec, LinkSpec

_SUFFIX = ".json"


def names() -> list[str]:
    """Return the names of the devices that come with the package, sorted."""
    entries = (files("cost_models") / "devices").iterdir()
    return sorted(entry.name.removesuffix(_SUFFIX) for entry in entries if entry.name.endswith(_SUFFIX))


def device(name: str | Path) -> DeviceSpec:
    """Return the device called ``name``, or the one in the JSON file at the path ``name`` (it ends in ``.json``).

    Raises ValueError when there is no such device or file, or when the file does not describe a device.
    """
    if str(name).endswith(_SUFFIX):
        return _read_file(Path(name))
    if name not in names():
        raise ValueError(
            f"there is no device {str(name)!r}; known devices: {', '.join(names())}; "
            "or give the path of a JSON file with the fields of cost_models.DeviceSpec"
        )
    return DeviceSpec.model_validate_json((files("cost_models") / "devices" / f"{name}{_SUFFIX}").read_bytes())


def link(source: str | Path | DeviceSpec, target: str | Path | DeviceSpec) -> LinkSpec:
    """Return the link that a transfer between two devices of one machine takes.

    A peer link when both ends have the same one, else the way through the host: the slower of the two host links.
    """
    first, second = (entry if isinstance(entry, DeviceSpec) else device(entry) for entry in (source, target))
    if first.peer_link is not None and second.peer_link is not None and first.peer_link.name == second.peer_link.name:
        return _slower(first.peer_link, second.peer_link)
    return _slower(first.host_link, second.host_link)


def _slower(first: LinkSpec, second: LinkSpec) -> LinkSpec:
    slow, fast = sorted((first, second), key=lambda spec: spec.bandwidth_bytes_per_s)
    if slow.latency_s >= fast.latency_s:
        return slow
    sources = {**slow.sources, "latency_s": fast.source("latency_s")}
    return LinkSpec(
        name=slow.name, bandwidth_bytes_per_s=slow.bandwidth_bytes_per_s, latency_s=fast.latency_s, sources=sources
    )


def _read_file(path: Path) -> DeviceSpec:
    try:
        return DeviceSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the device file {str(path)!r}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{str(path)!r} does not describe a device: {where}: {first['msg']} ({error.error_count()} problems in all)"
        ) from error
