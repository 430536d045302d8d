"""What the timed benchmarks share: interleaved readings, medians and quartiles, checks, and facts of the machine."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from tabulate import tabulate


@dataclass(frozen=True)
class Reading:
    """Seconds of one call: on the clock, of CPU over all threads, of CPU of the calling thread."""

    wall_s: float
    process_s: float
    thread_s: float


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the quartiles of at least one value."""
        low, median, high = (float(value) for value in numpy.percentile(values, [25, 50, 75]))
        return cls(median, low, high)

    def scaled(self, factor: float) -> Spread:
        """Return the same spread in another unit; a factor below 0 would turn it around."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def text(self, digits: int = 1) -> str:
        """Return ``median [low, high]``."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True)
class Check:
    """A number that is asked for, and what was measured."""

    name: str
    asked: str
    measured: float
    ok: bool


def at_least(name: str, asked: float, measured: float) -> Check:
    """Return the check that ``measured`` is not below ``asked``."""
    return Check(name, f">= {asked:g}", measured, measured >= asked)


def at_most(name: str, asked: float, measured: float) -> Check:
    """Return the check that ``measured`` is not above ``asked``."""
    return Check(name, f"<= {asked:g}", measured, measured <= asked)


def read(function: Callable[[], Any], *, calls: int = 1) -> Reading:
    """Return the mean seconds of ``calls`` calls made one after the other."""
    wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(calls):
        function()
    thread, process, wall = time.thread_time() - thread, time.process_time() - process, time.perf_counter() - wall
    return Reading(wall / calls, process / calls, thread / calls)


def interleave(
    contenders: Mapping[str, Callable[[], Any]], *, repeats: int, warmups: int = 1
) -> dict[str, list[Reading]]:
    """Read every contender so many times, in rounds, so that a busy minute of the machine affects them all alike.

    The order turns by one from round to round.
    """
    for function in contenders.values():
        for _ in range(warmups):
            function()
    found: dict[str, list[Reading]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name in rotated(list(contenders), turn):
            found[name].append(read(contenders[name]))
    return found


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the names with the first ``by`` of them moved to the end, around and around."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


@dataclass(frozen=True)
class Pairs:
    """Readings of a contender, each beside one of its reference taken just before or just after it."""

    ours: tuple[Reading, ...]
    reference: tuple[Reading, ...]

    def overhead(self, clock: str, *, cells: int) -> Spread:
        """Return seconds per cell over the reference on a clock, a field of :class:`Reading`.

        The median is the difference of the two medians; the quartiles are those of the pairs' differences.
        """
        ours = [getattr(reading, clock) for reading in self.ours]
        reference = [getattr(reading, clock) for reading in self.reference]
        pairs = Spread.of([(a - b) / cells for a, b in zip(ours, reference, strict=True)])
        return Spread((statistics.median(ours) - statistics.median(reference)) / cells, pairs.low, pairs.high)


def paired(
    contenders: Mapping[str, Callable[[], Any]],
    references: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    calls: int,
    warmups: int = 3,
) -> dict[str, Pairs]:
    """Read every contender beside the reference of the same name, in rounds; which of the two is first alternates."""
    for function in (*contenders.values(), *references.values()):
        read(function, calls=warmups)
    ours: dict[str, list[Reading]] = {name: [] for name in contenders}
    reference: dict[str, list[Reading]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name in rotated(list(contenders), turn):
            couple = [(contenders[name], ours[name]), (references[name], reference[name])]
            for function, readings in couple if turn % 2 else reversed(couple):
                readings.append(read(function, calls=calls))
    return {name: Pairs(tuple(ours[name]), tuple(reference[name])) for name in contenders}


def torchgpipe() -> ModuleType | None:
    """Return the peer, or None where it is not installed (it is in the ``bench`` extra)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torchgpipe")
    except ModuleNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """Return what the figures depend on: the machine, its load (1, 5 and 15 minutes), versions, threads, the date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "switch_interval_s": sys.getswitchinterval(),
        "autosplit": _version("autosplit"),
        "torchgpipe": _version("torchgpipe"),
    }


def _commit() -> str | None:
    """Return the commit of the working tree that is measured; None where git cannot tell."""
    asked = ["git", "rev-parse", "HEAD"]
    try:
        told = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return told.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    named = next((line for line in lines if line.startswith("model name")), None)
    return platform.processor() or platform.machine() if named is None else named.partition(":")[2].strip()


def facts_text(found: Mapping[str, Any]) -> str:
    """Return the facts as two lines for the head of a report."""
    load = " ".join(f"{value:.2f}" for value in found["load"])
    return (
        f"{found['date']}, {found['processor']}, {found['cores']} cores, load {load}\n"
        f"torch {found['torch']} with {found['torch_threads']} intra-op threads, Python {found['python']}, switch "
        f"interval {found['switch_interval_s'] * 1e3:g} ms, torchgpipe {found['torchgpipe'] or 'not installed'}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a text table; text stands left, numbers right."""
    return tabulate(rows, headers="keys", disable_numparse=True)


def checks_text(checks: Sequence[Check]) -> str:
    """Return the checks that fail, as a table, under a line that counts them all."""
    if not checks:
        return "nothing is asked of these contenders"
    failed = [check for check in checks if not check.ok]
    head = f"{len(checks) - len(failed)} of {len(checks)} checks hold"
    rows = [{"check": c.name, "asked": c.asked, "measured": f"{c.measured:.3f}"} for c in failed]
    return f"{head}; these do not:\n{table(rows)}" if failed else head


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a benchmark, with ``--json FILE``."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return result


def conclude(path: Path | None, *, checks: Sequence[Check], **content: Any) -> None:
    """Print the checks, and write all as :func:`write` does where a path is asked for."""
    print(checks_text(checks))
    if path is not None:
        write(path, checks=checks, **content)


def write(path: Path, *, benchmark: str, settings: Any, machine: Any, checks: Sequence[Check], figures: Any) -> None:
    """Write a benchmark's figures as JSON; raises ValueError for a figure that is no finite number."""
    content = {
        "benchmark": benchmark,
        "machine": {**_rounded(machine), "load_at_end": [round(load, 2) for load in os.getloadavg()]},
        "settings": dict(settings),
        "checks": [_rounded(asdict(check)) for check in checks],
        "figures": [_rounded(figure) for figure in figures],
    }
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Return plain data whose floats have five significant digits."""
    if isinstance(value, Spread):
        return _rounded(asdict(value))
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
