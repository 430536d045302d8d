"""What the zoo says: a line per model, and the numbers that were asked for beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks.zoo.case import BLOCKS
from benchmarks.zoo.measure import wrong

_CHECKS = ("eval", "train", "rows", "length", "values")
Result = dict[str, Any]


def is_equal(result: Result) -> bool:
    """Tell whether every check of a model gave the plain model's numbers in float32."""
    checks = result["checks"].values()
    return bool(result["answer"]) and all("error" not in c and not wrong(c) for c in checks)


def is_wrong(result: Result) -> bool:
    """Tell whether some check gave an answer without an error that float32 does not explain."""
    return any(wrong(c) and not c.get("only_float32") for c in result["checks"].values())


def _is_right(result: Result) -> bool:
    return bool(result["answer"]) and not is_wrong(result)


def verdict(result: Result) -> str:
    """Return a word for the model: "equal", "float32", "wrong", "refused", "crashed" or "zoo"."""
    if result.get("broken"):
        return "zoo"
    if is_wrong(result):
        return "wrong"
    if not result["answer"]:
        kind = result.get("error", {}).get("type")
        return "crashed" if kind in ("Crash", "Timeout") else "refused"
    return "equal" if is_equal(result) else "float32"


def lines(results: Sequence[Result]) -> str:
    """Return the table, a line per model."""
    rows = []
    for r in results:
        rows.append(
            [
                r["group"],
                r["name"],
                r.get("rung", "-"),
                r.get("stages"),
                r.get("microbatches"),
                r.get("nodes"),
                _percent(r.get("largest_share")),
                _percent(r.get("full_share")),
                _seconds(r.get("record_s")),
                _seconds(r.get("split_s")),
                *(_check(r["checks"].get(name)) for name in _CHECKS),
                verdict(r),
            ]
        )
    heads = "group model rung stages mb nodes largest full record_s split_s".split()
    return tabulate(rows, [*heads, *_CHECKS, "verdict"], tablefmt="simple", disable_numparse=True)


def numbers(results: Sequence[Result]) -> list[tuple[str, str, str, bool]]:
    """Return what was asked, the figure asked for, the figure measured, and whether that is enough."""
    usable = [r for r in results if not r.get("broken")]
    split = [r for r in usable if "rung" in r]
    first = [r for r in split if r["rung"] == "recorded"]
    deep = [r["largest_share"] for r in split if r["blocks"] >= BLOCKS and r.get("largest_share") is not None]
    seconds = [r["record_s"] for r in usable if r.get("record_s") is not None]
    out = [
        _share("give an answer", 1.00, (r["answer"] for r in usable)),
        _share("equal the plain model", 0.98, (is_equal(r) for r in usable)),
        _share("equal, or apart by float32's rounding alone", 0.98, (_is_right(r) for r in usable)),
        _share("silently wrong", 0.0, (is_wrong(r) for r in usable), most=True),
        _share("run whole (one stage or one chunk)", 0.03, (r["whole"] for r in split), most=True),
        _share("more than half of the FLOPs once per step", 0.03, (r["full_share"] > 0.5 for r in split), most=True),
        _share("on the first rung", 0.92, (r in first for r in usable)),
        _share("names and mode switch exact, first rung", 1.0, (r["names_exact"] and r["switch_exact"] for r in first)),
    ]
    if deep:
        over = sum(share > 0.25 for share in deep)
        text = f"{max(deep):.1%} at most, {over} of {len(deep)} over"
        out.append(("largest node, eight blocks and more", "<= 25%", text, over == 0))
    if seconds:
        median = statistics.median(seconds)
        out.append(("median seconds to record", "<= 1.0", f"{median:.2f}", median <= 1.0))
    return out


def summary(results: Sequence[Result]) -> str:
    """Return the numbers as a table."""
    rows = [(what, asked, found, "yes" if enough else "NO") for what, asked, found, enough in numbers(results)]
    return tabulate(rows, ["", "asked", "measured", "met"], tablefmt="simple", disable_numparse=True)


def _share(what: str, asked: float, holds: Iterable[bool], *, most: bool = False) -> tuple[str, str, str, bool]:
    found = list(holds)
    count = sum(found)
    share = count / len(found) if found else 0.0
    enough = share <= asked if most else share >= asked
    return what, f"{'<=' if most else '>='} {asked:.0%}", f"{share:.1%} ({count} of {len(found)})", enough


def _check(check: dict[str, Any] | None) -> str:
    if check is None:
        return ""
    if "error" in check:
        return check["error"]["type"]
    mark = "!" if check["mismatch"] else ""
    return f"{check['difference']:.0e}{mark}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"
