"""Devices and machines as text: which are known, and where each of their figures comes from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import combinations

from autosplit.report.document import DEFAULT_WIDTH, Section, as_text, column
from autosplit.report.words import size_words
from autosplit.units import format_bytes, format_seconds
from cost_models import DeviceSpec, LinkSpec, MachineSpec, device, find, machine, machine_names, names
from cost_models.specs import Spec

RATES = ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
STATUSES = ("measured", "datasheet", "recalled", "prior")


def describe(name: str | None, *, as_json: bool) -> str:
    """Return all that is known, or one device or machine, as tables or as JSON.

    ValueError: there is no such name, or the file describes none.
    """
    if name is None and as_json:
        return _listed_json()
    if name is None:
        return as_text((_devices("Devices", map(device, names())), _machines()), width=DEFAULT_WIDTH)
    spec = find(name)
    if as_json:
        return spec.model_dump_json(indent=2)
    sections = list(_device(spec) if isinstance(spec, DeviceSpec) else _machine(spec))
    if spec.notes:
        sections.append(Section(f"note: {spec.notes}"))
    return as_text(sections, width=DEFAULT_WIDTH)


def _listed_json() -> str:
    machines = []
    for spec in map(machine, machine_names()):
        machines.append(spec.model_dump(mode="json") | {"devices": [entry.name for entry in spec.devices]})
    listed = {"devices": [device(name).model_dump(mode="json") for name in names()], "machines": machines}
    return json.dumps(listed, indent=2, ensure_ascii=False)


def _devices(title: str, specs: Iterable[DeviceSpec]) -> Section:
    rows = list(specs)
    trust = " ".join(status[0] for status in STATUSES)
    columns = (
        column("device", rows, lambda spec: spec.name, align="left"),
        column(
            "usable", rows, lambda spec: "its host's" if spec.usable_bytes is None else size_words(spec.usable_bytes)
        ),
        column("TB/s", rows, lambda spec: _tera(spec.memory_bandwidth_bytes_per_s)),
        *(column(dtype, rows, partial(_rate, dtype=dtype)) for dtype in RATES),
        column("peer", rows, lambda spec: _giga(spec.peer_link)),
        column("host", rows, lambda spec: _giga(spec.host_link)),
        column(trust, rows, lambda spec: _trust(spec)),
    )
    below = (
        "usable: memory that tensors can have. TB/s: of memory. fp8 to fp64: dense TFLOP/s, in brackets if emulated.",
        f"peer, host: GB/s each way to a neighbour and to the host. {trust}: how many are {', '.join(STATUSES)}.",
    )
    return Section(title, columns=columns, below=below)


def _machines() -> Section:
    rows = [machine(name) for name in machine_names()]
    columns = (
        column("machine", rows, lambda spec: spec.name, align="left"),
        column("neighbours' link", rows, lambda spec: spec.link(0, 1).name, align="left"),
        column("host memory", rows, lambda spec: size_words(spec.host.memory_bytes), align="left"),
        column("what it is", rows, lambda spec: spec.notes, align="left"),
    )
    return Section("Machines", columns=columns)


def _device(spec: DeviceSpec) -> Iterator[Section]:
    yield _figures(spec.name, spec)
    yield _figures(f"to the host: {spec.host_link.name}", spec.host_link)
    if spec.peer_link is not None:
        yield _figures(f"to a neighbour: {spec.peer_link.name}", spec.peer_link)


def _machine(spec: MachineSpec) -> Iterator[Section]:
    hosts = "one host" if len(spec.host_devices) == 1 else f"{len(spec.host_devices)} hosts"
    kinds = Counter(entry.name for entry in spec.devices)
    listed = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    yield _figures(f"{spec.name}: {listed} on {hosts}", spec.host)
    yield _devices("Its devices", {entry.name: entry for entry in spec.devices}.values())
    links: list[LinkSpec] = []
    for first, second in combinations(range(len(spec)), 2):
        link = spec.link(first, second)
        if link not in links:
            links.append(link)
            yield _figures(f"{link.name}, such as {first} to {second}", link)


def _figures(title: str, spec: Spec) -> Section:
    """Return every figure with its source."""
    rows = list(spec.figures())
    columns = (
        column("figure", rows, str, align="left"),
        column("value", rows, lambda name: _value(name, spec.figure(name)), align="left"),
        column("status", rows, lambda name: spec.source(name).status, align="left"),
        column("source", rows, lambda name: spec.source(name).text, align="left"),
    )
    return Section(title, columns=columns)


def _value(name: str, value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("flops_per_s") or "." in name:
        return f"{_tera(value)} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") else str(value)


def _rate(spec: DeviceSpec, dtype: str) -> str:
    for known, form in ((spec.peak_flops_per_s, "{}"), (spec.emulated_flops_per_s, "({})")):
        rates = {str(name): rate for name, rate in known.items()}
        if dtype in rates:
            return form.format(_tera(rates[dtype]))
    return "-"


def _trust(spec: DeviceSpec) -> str:
    parts: list[Spec] = [spec, spec.host_link, *([spec.peer_link] if spec.peer_link is not None else [])]
    counts = Counter[str](item.source(figure).status for item in parts for figure in item.figures())
    return " ".join(f"{counts[status]:2}" for status in STATUSES)


def _tera(value: float) -> str:
    return f"{value / 1e12:.3g}" if value < 1e15 else f"{value / 1e12:.0f}"


def _giga(link: LinkSpec | None) -> str:
    return "-" if link is None else f"{link.bandwidth_bytes_per_s / 1e9:.4g}"
