"""Words of a report: modules, numbers, devices and choices as short text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from autosplit.planning.plan.diff import prefixes
from autosplit.planning.plan.plan import Plan
from autosplit.units import format_bytes

RANGES = 4
"""How many ranges of numbers are listed at most."""


def fit_modules(names: Iterable[str], *, width: int | None) -> str:
    """Return as many modules as ``width`` columns hold (None: all), and how many are left out.

    Numbered neighbours become ranges: ``h.0, h.1, h.2`` is ``h.0-h.2``.
    """
    parts = _module_ranges(names)
    if width is None:
        return ", ".join(parts) or "-"
    for count in range(len(parts), 0, -1):
        left = len(parts) - count
        text = ", ".join(parts[:count]) + (f", +{left} more" if left else "")
        if len(text) <= width:
            return text
    tail = f", +{len(parts) - 1} more" if len(parts) > 1 else ""
    return (clip(parts[0], width=width - len(tail)) + tail) if parts else "-"


def covers(plan: Plan) -> list[list[str]]:
    """Return each stage's modules: the largest subtrees that no other stage shares, ``(part)`` where one is shared."""
    owners: dict[str, set[int]] = {}
    for stage in plan.stages:
        for path in stage.modules:
            for prefix in prefixes(path):
                owners.setdefault(prefix, set()).add(stage.index)

    def largest(path: str) -> str:
        return next((prefix for prefix in prefixes(path) if len(owners[prefix]) == 1), f"{path} (part)")

    return [list(dict.fromkeys(map(largest, stage.modules))) for stage in plan.stages]


def _module_ranges(names: Iterable[str]) -> list[str]:
    numbers: dict[str, list[int]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(|.*\.)(0|[1-9][0-9]{0,17})", name)
        if match is None:
            numbers[name] = []
        else:
            numbers.setdefault(match[1], []).append(int(match[2]))
    return [text for name, items in numbers.items() for text in (_ranges(name, items) if items else [name or "(root)"])]


def _ranges(prefix: str, numbers: list[int]) -> list[str]:
    parent = prefix[:-1].rpartition(".")[2]
    last = f"{parent}." if parent else ""
    texts = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        ids = [number for _, number in run]
        texts.append(f"{prefix}{ids[0]}" + (f"-{last}{ids[-1]}" if len(ids) > 1 else ""))
    return texts


def shorten(text: str, *, width: int | None) -> str:
    """Return ``text`` without its start when it is longer than ``width``: the end of a dotted name tells more."""
    return text if width is None or len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def clip(text: str, *, width: int | None) -> str:
    """Return ``text`` without its end when it is longer than ``width``."""
    return text if width is None or len(text) <= width else f"{text[: max(0, width - 3)]}..."


def numbers(values: Iterable[int]) -> str:
    """Return whole numbers with neighbours as ranges: ``"0, 2-4"``."""
    return ", ".join(_ranges("", sorted(values)))


def some_numbers(values: Iterable[int]) -> str:
    """Return whole numbers as `numbers` does; how many there are, and between which, where that would be long."""
    ordered = sorted(values)
    text = numbers(ordered)
    return text if text.count(",") < RANGES else f"{len(ordered)} of {ordered[0]}-{ordered[-1]}"


def size_words(count: int | None) -> str:
    """Return a number of bytes, or a dash for one that is not known."""
    return "-" if count is None else format_bytes(count)


def repeats(names: Sequence[str]) -> str:
    """Return names with equal neighbours counted: ``"2 x cuda:0, cpu"``."""
    counts = [(name, len(list(run))) for name, run in groupby(names)]
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts)


def device_words(names: Sequence[str]) -> str:
    """Return devices as a range where they are numbered one after the other: ``"cuda:0 to cuda:7"``."""
    prefix = names[0].rstrip("0123456789")
    first = int(names[0].removeprefix(prefix) or 0)
    numbered = all(name == f"{prefix}{first + offset}" for offset, name in enumerate(names))
    return f"{names[0]} to {names[-1]}" if numbered and len(names) > 2 else repeats(names)


def format_count(count: float) -> str:
    """Return a number of elements or operations with three significant digits: ``"1.24 M"``."""
    size = float(count)
    for unit in ("", " k", " M", " G", " T", " P"):
        if size < 999.5:
            return f"{size:.0f}" if not unit else f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}{unit}"
        size /= 1000
    return f"{size:.3g} E"


def format_rate(rate: float) -> str:
    """Return a number per second: ``"7,085"``, ``"42.1"``, ``"0.173"``."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def format_usd(amount: float) -> str:
    """Return US dollars: ``"$0.44"``, ``"$31.9"``, ``"$1,250"``."""
    return f"${amount:.2f}" if amount < 10 else f"${amount:.1f}" if amount < 100 else f"${amount:,.0f}"


def recompute_words(options: Sequence[str]) -> str:
    """Return what stages recompute: ``"never"``, or ``"block on 0-2, else never"`` with the commonest last."""
    if len(set(options)) <= 1:
        return options[0] if options else "never"
    places: dict[str, list[int]] = {}
    for stage, option in enumerate(options):
        places.setdefault(option, []).append(stage)
    rest = max(places, key=lambda option: (len(places[option]), option == "never"))
    listed = [f"{option} on {numbers(stages)}" for option, stages in places.items() if option != rest]
    return f"{', '.join(listed)}, else {rest}"


def schedule_words(schedule: str, virtual_stages: int, replicas: Sequence[int] = ()) -> str:
    """Return a schedule's name with its stages per device where there are several: ``"interleaved x 2"``.

    Or with the replicas of each stage: ``"1f1b 2-1"``.
    """
    if replicas:
        return f"{schedule} {'-'.join(map(str, replicas))}"
    return f"{schedule} x {virtual_stages}" if virtual_stages > 1 else schedule
