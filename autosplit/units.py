"""Text for bytes, seconds and numbers of things, and bytes from text."""

from __future__ import annotations

import math
import re

from autosplit.errors import InputError

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | float | str) -> int:
    """Return bytes from a number or from text such as ``"70GiB"``, ``"1.5 MB"``, ``"4096"``."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{value!r} is no number of bytes")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].upper() not in _BYTES:
        raise InputError(f"{value!r} is no size in bytes; write a number, or text such as '70GiB' or '512MB'")
    size = float(match[1]) * _BYTES[match[2].upper()]
    if math.isinf(size):
        raise InputError(f"{value!r} is no number of bytes")
    return int(size)


def format_bytes(count: float) -> str:
    """Return bytes in binary units, three significant digits: ``"91.4 GiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{_digits(size)}f} {unit}"
        size /= 1024
    return f"{size:.{_digits(size)}f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: ``"12.3 ms"``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            value = seconds / scale
            return f"{value:.{_digits(value)}f} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0 s"


def plural(count: int, noun: str) -> str:
    """Return a number and its noun: ``"1 row"``, ``"2 rows"``, ``"3 microbatches"``."""
    more = f"{noun}es" if noun.endswith(("ch", "sh")) else f"{noun}s"
    return f"{count} {noun if count == 1 else more}"


def _digits(value: float) -> int:
    size = abs(value)
    return 2 if size < 10 else 1 if size < 100 else 0
