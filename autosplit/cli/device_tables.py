"""Devices and machines as text: which are known, and where each of their figures comes from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from autosplit.units import format_bytes, format_seconds
from cost_models import DeviceSpec, LinkSpec, MachineSpec, Source, device, find, machine, machine_names, names
from cost_models.specs import Spec

RATES = ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
STATUSES = ("measured", "datasheet", "recalled", "prior")


def describe(name: str | None, *, as_json: bool) -> str:
    """Return all that is known, or one device or machine, as tables or as JSON.

    ValueError: there is no such name, or the file describes none.
    """
    if name is None:
        return _listed_json() if as_json else _listed()
    found = find(name)
    if as_json:
        return found.model_dump_json(indent=2)
    return _device(found) if isinstance(found, DeviceSpec) else _machine(found)


def _listed() -> str:
    return "\n".join((_device_table(map(device, names())), "", _machine_table(map(machine, machine_names()))))


def _listed_json() -> str:
    machines = [machine(name) for name in machine_names()]
    listed: dict[str, Any] = {
        "devices": [device(name).model_dump(mode="json") for name in names()],
        "machines": [
            spec.model_dump(mode="json", exclude={"devices"}) | {"devices": [entry.name for entry in spec.devices]}
            for spec in machines
        ],
    }
    return json.dumps(listed, indent=2, ensure_ascii=False)


def _device_table(specs: Iterable[DeviceSpec]) -> str:
    rows = [
        [
            spec.name,
            "its host's" if spec.usable_bytes is None else format_bytes(spec.usable_bytes),
            _tera(spec.memory_bandwidth_bytes_per_s),
            *(_rate(spec, dtype) for dtype in RATES),
            "-" if spec.peer_link is None else _giga(spec.peer_link.bandwidth_bytes_per_s),
            _giga(spec.host_link.bandwidth_bytes_per_s),
            _trust(_all_sources(spec)),
        ]
        for spec in specs
    ]
    header = ["device", "usable", "TB/s", *RATES, "peer", "host", " ".join(status[0] for status in STATUSES)]
    legend = (
        "usable: memory that tensors can have. TB/s: of memory. fp8 to fp64: dense TFLOP/s, in brackets where emulated."
        "\npeer, host: GB/s each way to a neighbour and to the host. "
        f"{' '.join(status[0] for status in STATUSES)}: how many figures are {', '.join(STATUSES)}."
    )
    return f"{_table(rows, header)}\n\n{legend}"


def _machine_table(specs: Iterable[MachineSpec]) -> str:
    rows = [
        [
            spec.name,
            spec.link(0, 1).name,
            "-" if spec.host.memory_bytes is None else format_bytes(spec.host.memory_bytes),
            spec.notes,
        ]
        for spec in specs
    ]
    return _table(rows, ["machine", "neighbours' link", "host memory", "what it is"], align=("left",) * 4)


def _device(spec: DeviceSpec) -> str:
    blocks = [f"{spec.name}\n{_figures(spec)}", _link(f"to the host: {spec.host_link.name}", spec.host_link)]
    if spec.peer_link is not None:
        blocks.append(_link(f"to a neighbour: {spec.peer_link.name}", spec.peer_link))
    if spec.notes:
        blocks.append(f"note: {spec.notes}")
    return "\n\n".join(blocks)


def _machine(spec: MachineSpec) -> str:
    hosts = "one host" if len(spec.host_devices) == 1 else f"{len(spec.host_devices)} hosts"
    kinds = Counter(entry.name for entry in spec.devices)
    title = f"{spec.name}: {', '.join(f'{count} x {name}' for name, count in kinds.items())} on {hosts}"
    blocks = [f"{title}\n{_figures(spec.host)}", _device_table({s.name: s for s in spec.devices}.values())]
    blocks += [_link(f"{link.name}, such as {pair}", link) for pair, link in _kinds_of_link(spec)]
    if spec.notes:
        blocks.append(f"note: {spec.notes}")
    return "\n\n".join(blocks)


def _kinds_of_link(spec: MachineSpec) -> list[tuple[str, LinkSpec]]:
    """Return every different link of a machine, with the first pair of devices that it joins."""
    found: list[tuple[str, LinkSpec]] = []
    for first in range(len(spec)):
        for second in range(first + 1, len(spec)):
            link = spec.link(first, second)
            if all(link != known for _, known in found):
                found.append((f"{first} to {second}", link))
    return found


def _link(title: str, spec: LinkSpec) -> str:
    return f"{title}\n{_figures(spec)}"


def _figures(spec: Spec) -> str:
    rows = [[f"  {name}", _value(name, spec.figure(name)), *_said(spec.source(name))] for name in spec.figures()]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _said(source: Source) -> tuple[str, str]:
    return source.status, source.text


def _value(name: str, value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("flops_per_s") or ".fp" in name or "." in name:
        return f"{_tera(value)} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{_giga(value)} GB/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") else str(value)


def _rate(spec: DeviceSpec, dtype: str) -> str:
    for known, form in ((spec.peak_flops_per_s, "{}"), (spec.emulated_flops_per_s, "({})")):
        rates = {str(name): rate for name, rate in known.items()}
        if dtype in rates:
            return form.format(_tera(rates[dtype]))
    return "-"


def _all_sources(spec: DeviceSpec) -> list[Source]:
    links = [spec.host_link] + ([spec.peer_link] if spec.peer_link is not None else [])
    parts: list[Spec] = [spec, *links]
    return [part.source(figure) for part in parts for figure in part.figures()]


def _trust(sources: Sequence[Source]) -> str:
    counts = Counter[str](source.status for source in sources)
    return " ".join(f"{counts[status]:2}" for status in STATUSES)


def _tera(value: float) -> str:
    return f"{value / 1e12:.3g}" if value < 1e15 else f"{value / 1e12:.0f}"


def _giga(value: float) -> str:
    return f"{value / 1e9:.4g}"


def _table(rows: Sequence[Sequence[str]], header: Sequence[str], *, align: Sequence[str] | None = None) -> str:
    sides = align or ("left", *("right",) * (len(header) - 1))
    return tabulate(rows, headers=header, tablefmt="simple", disable_numparse=True, colalign=sides)
