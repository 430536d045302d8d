"""Devices and machines by name: those that come with the package, and the user's own JSON files."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cost_models.machines import HostSpec, MachineSpec, direct_link
from cost_models.networks import with_network
from cost_models.specs import DeviceSpec, LinkSpec, Source, describe

_SUFFIX = ".json"
_MOST_DEVICES = 4096
_COUNT = re.compile(r"\s*(\d+)\s*[xX×]\s*(?=\S)")
_PART = re.compile(r"[a-z]{2,}(?=\d{3,})|[a-z]*\d+[a-z]*|[a-z]{2,}")
_SAID_OF_MANY = frozenset(("nvidia", "amd", "tesla", "geforce", "instinct", "gpu", "dgx", "hgx"))
_MOST_NEAR, _LEAST_LIKENESS = 3, 0.5
_FORMS = 'a text such as "8xH100", "2x8xH100-SXM5-80GB" (two hosts) or "2xA100-SXM4-80GB+2xL4-24GB"'


def names() -> list[str]:
    """Return the names of the devices that come with the package, sorted."""
    return list(_shipped("devices"))


def machine_names() -> list[str]:
    """Return the names of the machines that come with the package, sorted."""
    return list(_shipped("machines"))


def device(name: str | Path) -> DeviceSpec:
    """Return the device called ``name``, or the one in the JSON file at the path ``name`` (it ends in ``.json``).

    A shorter name means the usual device of that name: "H100" the H100-SXM5-80GB, "4090" the RTX4090-24GB.

    Raises ValueError when there is no such device or file, or when the file does not describe a device.
    """
    if str(name).endswith(_SUFFIX):
        return _device(_read_file(Path(name)), where=str(name))
    if (known := usual(str(name))) is None:
        raise ValueError(
            f"there is no device {str(name)!r}{_meant(str(name), names())}; autosplit devices and cost_models.names() "
            "list all; or give the path of a JSON file with the fields of cost_models.DeviceSpec"
        )
    return DeviceSpec.model_validate_json(_read_shipped("devices", known))


def usual(name: str) -> str | None:
    """Return the known device that a name means, whatever its case and dashes; None where it means none.

    Parts may be left out from the end or the middle: of several devices it is the one on a board that servers have
    (SXM), then the one with the most memory.
    """
    if name in names():
        return name
    meant = [known for known in names() if re.fullmatch(_short_form(known), _squashed(name))]
    return max(meant, key=lambda known: ("-SXM" in known, device(known).memory_bytes or 0), default=None)


def _short_form(known: str) -> str:
    """Return a pattern of what a device may be called, without dashes: ``rtx4090``, ``4090``, ``h100 80gb sxm``."""
    model, *board, memory = map(_squashed, known.split("-"))
    lead = re.sub("^rtx", "(?:nvidia|geforce)?(?:rtx)?", model)
    middle = "".join(f"(?:{part}?)?" for part in board)
    size = f"(?:{memory.removesuffix('gb')}(?:gb?)?)?"
    return f"{lead}(?:{middle}{size}|{size}{middle})"


def machine(devices: str | Path | Sequence[str | Path | DeviceSpec]) -> MachineSpec:
    """Return the machine with these devices, in this order.

    ``devices`` is the text form of a machine, a list of devices on one host, each a name, the path of a device file or
    a spec, or the path of a machine file (it ends in ``.json``). The text form is ``<devices>x<name>``,
    ``<hosts>x<devices>x<name>``, or several kinds on one host joined by ``+``; ``@400Gbit`` behind it is the network of
    each host. ``machine(text).name`` is the text form again. A machine that comes with the package has its host's
    figures; any other has round numbers to plan with.

    Raises:
        ValueError: a text that has no such form, an unknown device, or a file that describes no machine.
    """
    if isinstance(devices, str | Path):
        path = Path(devices)
        if str(devices).endswith(_SUFFIX) and (path.is_file() or not _COUNT.match(str(devices))):
            return _machine_file(path)
        return _machine_text(str(devices))
    if not devices:
        raise ValueError(f"a machine has at least one device; give a list of names, or {_FORMS}")
    specs = [entry if isinstance(entry, DeviceSpec) else device(entry) for entry in devices]
    return _assembled(specs).model_copy(update={"taken": _taken(list(map(str, devices)), specs)})


def spread(machine: MachineSpec) -> MachineSpec:
    """Return a machine on several hosts where one has more devices of a kind than are joined by peer links.

    ``64xH100-SXM5-80GB`` is eight hosts then; any other machine comes back as it is.
    """
    group, kinds = machine.devices[0].peer_group, {spec.name for spec in machine.devices}
    count = len(machine)
    if len(machine.host_devices) > 1 or len(kinds) > 1 or group is None or count <= group or count % group:
        return machine
    hosts = _assembled(machine.devices[:group], hosts=count // group)
    return hosts.model_copy(update={"taken": machine.taken})


def find(name: str | Path) -> DeviceSpec | MachineSpec:
    """Return what ``name`` names: a device, by its name or its file, or else a machine, as ``machine`` does.

    Raises ValueError when it names neither.
    """
    if usual(str(name)) is not None:
        return device(name)
    is_device_file = str(name).endswith(_SUFFIX) and Path(name).is_file() and _is_device(_read_file(Path(name)))
    return device(name) if is_device_file else machine(name)


def link(source: str | Path | DeviceSpec, target: str | Path | DeviceSpec) -> LinkSpec:
    """Return the link that a transfer between two neighbours of one machine takes.

    A peer link when both ends have the same one, else the way through the host: the slower of the two host links.
    ``machine(...).link`` knows more: which devices are neighbours, and other hosts.
    """
    first, second = (entry if isinstance(entry, DeviceSpec) else device(entry) for entry in (source, target))
    return direct_link(first, second)


def identify(driver_name: str) -> DeviceSpec | None:
    """Return the device that the driver calls ``driver_name`` (``torch.cuda.get_device_name()``), None if unknown."""
    return next((spec for spec in map(device, names()) if driver_name in spec.driver_names), None)


def networked(machine: MachineSpec, speed: str) -> MachineSpec:
    """Return a machine of several hosts with another network between them: "100Gbit", of each host.

    Raises ValueError for a text that is no speed, and for a machine of one host.
    """
    return with_network(spread(machine), speed, unknown=network())


def _machine_text(text: str) -> MachineSpec:
    text, at, speed = text.partition("@")
    if at:
        return networked(_machine_text(text), speed)
    if text in machine_names():
        return _machine(json.loads(_read_shipped("machines", text)), where=text, folder=None)
    specs, hosts = _layout(text, folder=None)
    terms = text.split("+")
    meant = [_named(_counts(term, text=text)[1], text=text, folder=None) for term in terms]
    return _assembled(specs, hosts=hosts).model_copy(update={"taken": _taken(terms, meant)})


def _taken(terms: Sequence[str], specs: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """Return which devices were taken to be meant by names that are not their own."""
    pairs = dict.fromkeys(zip(terms, (spec.name for spec in specs), strict=True))
    ours = [(term, name) for term, name in pairs if name in names() and _squashed(name) not in _squashed(term)]
    return tuple(f"{term.strip()}: taken as {name}" for term, name in ours if not term.endswith(_SUFFIX))


def _layout(text: str, *, folder: Path | None) -> tuple[list[DeviceSpec], int]:
    """Return the devices of one host, and how many such hosts there are."""
    parts = text.split("+")
    hosts, specs = 1, list[DeviceSpec]()
    for term in parts:
        counts, name = _counts(term, text=text)
        if len(counts) == 2:
            if len(parts) > 1:
                raise ValueError(f"{text!r} mixes hosts and kinds of devices; write a machine file with host_devices")
            hosts = counts[0]
        specs += [_named(name, text=text, folder=folder)] * counts[-1]
    return specs, hosts


def _counts(rest: str, *, text: str) -> tuple[list[int], str]:
    """Return the numbers before a device's name, at most two, and the name."""
    counts = list[int]()
    while len(counts) < 2 and (match := _COUNT.match(rest)):
        counts.append(int(match[1]))
        rest = rest[match.end() :]
    total = 1
    for count in counts:
        total *= count
    if not rest.strip() or not 1 <= total <= _MOST_DEVICES:
        raise ValueError(f"{text!r} names no machine; write {_FORMS}, with 1 to {_MOST_DEVICES} devices")
    return counts or [1], rest.strip()


def _named(name: str, *, text: str, folder: Path | None) -> DeviceSpec:
    if name.endswith(_SUFFIX) or usual(name) is not None:
        return device(_beside(name, folder))
    of = "" if name == text else f" in {text!r}"
    raise ValueError(
        f"there is no device {name!r}{of}{_meant(name, names())}; autosplit devices lists all; write {_FORMS}, or give "
        "the path of a JSON file"
    )


def _assembled(specs: Sequence[DeviceSpec], *, hosts: int = 1) -> MachineSpec:
    """Return the machine with these devices on each host; what is known of one host of that kind holds for several."""
    host_name = _text(specs, hosts=1)
    is_known = host_name in machine_names() and all(spec == device(spec.name) for spec in specs)
    known = _machine_text(host_name) if is_known else None
    if known is not None and hosts == 1:
        return known
    return MachineSpec(
        name=_text(specs, hosts=hosts),
        devices=tuple(specs) * hosts,
        host_devices=(len(specs),) * hosts,
        host=known.host if known else _host(specs),
        network=((known.network if known else None) or network()) if hosts > 1 else None,
        notes=f"{hosts} x {known.notes}" if known else "",
    )


def _host(specs: Sequence[DeviceSpec]) -> HostSpec:
    if all(spec.issue_s == 0 for spec in specs):
        per_lane = Source(status="prior", text="every lane's own thread issues its work")
        return HostSpec(issue_threads=len(specs), sources={"issue_threads": per_lane})
    shared = Source(status="prior", text="one thread issues for all devices of a host, as a single process does")
    return HostSpec(issue_threads=1, sources={"issue_threads": shared})


def _text(specs: Iterable[DeviceSpec], *, hosts: int) -> str:
    runs = [(name, len(list(run))) for name, run in itertools.groupby(spec.name for spec in specs)]
    text = "+".join(f"{count}x{name}" for name, count in runs)
    return f"{hosts}x{text}" if hosts > 1 else text


def network() -> LinkSpec:
    """Return what is taken for one device's way to another host where nothing is known of it."""
    guess = "a round number to plan with; nothing was measured"
    sources = {
        "bandwidth_bytes_per_s": Source(status="prior", text=f"one 400 Gb/s adapter for each device: {guess}"),
        "latency_s": Source(status="prior", text=guess),
    }
    return LinkSpec(name="network", bandwidth_bytes_per_s=50e9, latency_s=1e-5, sources=sources)


def _machine_file(path: Path) -> MachineSpec:
    fields = _read_file(path)
    if _is_device(fields):
        return _assembled([_device(fields, where=str(path))])
    return _machine(fields, where=str(path), folder=path.parent)


def _is_device(fields: Any) -> bool:
    return isinstance(fields, dict) and "devices" not in fields and "peak_flops_per_s" in fields


def _machine(fields: Any, *, where: str, folder: Path | None) -> MachineSpec:
    """Make a machine of a file's fields, whose devices may be names, paths beside the file, or one text."""
    try:
        return MachineSpec.model_validate(_with_devices(fields, folder=folder))
    except ValidationError as error:
        raise ValueError(f"{where!r} does not describe a machine: {describe(error)}") from error
    except ValueError as error:
        raise ValueError(f"{where!r} does not describe a machine: {error}") from error


def _with_devices(fields: Any, *, folder: Path | None) -> Any:
    listed = fields.get("devices") if isinstance(fields, dict) else None
    if isinstance(listed, str):
        specs, hosts = _layout(listed, folder=folder)
        shape = {"devices": specs * hosts, "host_devices": (len(specs),) * hosts}
        return shape | {name: value for name, value in fields.items() if name != "devices"}
    if isinstance(listed, list):
        specs = [device(_beside(entry, folder)) if isinstance(entry, str) else entry for entry in listed]
        return {"host_devices": (len(specs),)} | fields | {"devices": specs}
    return fields


def _beside(name: str, folder: Path | None) -> str | Path:
    return folder / name if name.endswith(_SUFFIX) and folder is not None else name


def _device(fields: Any, *, where: str) -> DeviceSpec:
    try:
        return DeviceSpec.model_validate(fields)
    except ValidationError as error:
        raise ValueError(f"{where!r} does not describe a device: {describe(error)}") from error


def _read_file(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the file {str(path)!r}: {error.strerror}") from error
    except RecursionError:
        raise ValueError(f"{str(path)!r} is nested too deeply to be a device or a machine") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of more digits than Python reads
        raise ValueError(f"{str(path)!r} is no JSON: {error}") from error


def nearest(name: str, *, among: Iterable[str]) -> list[str]:
    """Return the known names nearest to ``name``, the best first: those with most of its parts, else alike ones."""
    known = list(among)
    parts = [word for word in _PART.findall(name.lower()) if len(word) > 1 and word not in _SAID_OF_MANY]
    shared = {entry: sum(word in _squashed(entry) for word in parts) for entry in known}
    alike = {entry: _likeness("".join(parts), entry) for entry in known}
    most = max(shared.values(), default=0)
    closest = [entry for entry in known if shared[entry] == most and (most or alike[entry] >= _LEAST_LIKENESS)]
    return sorted(closest, key=lambda entry: (-alike[entry], len(entry), entry))[:_MOST_NEAR]


def _likeness(wanted: str, entry: str) -> float:
    """Return how much of a known name, or of its part before the first hyphen, someone wrote: 1 for all of it."""
    texts = (_squashed(entry), _squashed(entry.partition("-")[0]))
    return max(SequenceMatcher(None, wanted, text).ratio() for text in texts)


def _squashed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _meant(name: str, known: Iterable[str]) -> str:
    closest = nearest(name, among=known)
    return f", the nearest: {', '.join(closest)}" if closest else ""


@cache
def _shipped(kind: str) -> tuple[str, ...]:
    entries = (files("cost_models") / kind).iterdir()
    return tuple(sorted(entry.name.removesuffix(_SUFFIX) for entry in entries if entry.name.endswith(_SUFFIX)))


@cache
def _read_shipped(kind: str, name: str) -> bytes:
    return (files("cost_models") / kind / f"{name}{_SUFFIX}").read_bytes()
