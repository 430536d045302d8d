"""``python -m benchmarks.zoo [--only NAME] [--group GROUP] [--jobs N] [--json FILE] [--resume]``."""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo import __doc__ as about
from benchmarks.zoo.catalog import GROUPS, cases
from benchmarks.zoo.runner import Limits, run_all
from benchmarks.zoo.table import lines, summary, verdict


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases that were asked for; print a line for each, then the table and the numbers of all."""
    options = _parser().parse_args(argv)
    results = _read(options.json) if options.resume else {}
    chosen = [c for c in cases(tuple(options.group)) if not options.only or c.name in options.only]
    unknown = set(options.only) - {c.name for c in chosen}
    if unknown:
        raise SystemExit(f"no such model here: {', '.join(sorted(unknown))}; --list prints the names")
    if options.list:
        print("\n".join(f"{c.group:13} {c.name}" for c in chosen))
        return
    left = [c for c in chosen if options.only or f"{c.group}/{c.name}" not in results]
    limits = Limits(options.seconds, int(options.gib * 2**30))
    for result in run_all(left, jobs=options.jobs, limits=limits):
        results[f"{result['group']}/{result['name']}"] = result
        error = result.get("error") or next((c["error"] for c in result["checks"].values() if "error" in c), None)
        text = f" {error['type']}: {error['text'][:160]}" if error else ""
        print(f"{verdict(result):8} {result['seconds']:6.1f} s  {result['group']}/{result['name']}{text}", flush=True)
        if options.json:
            _write(options.json, results)
    print(f"\n{lines(list(results.values()))}\n\n{summary(list(results.values()))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this model; may repeat")
    parser.add_argument("--group", action="append", default=[], choices=GROUPS, help="run this group; may repeat")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="write the results here after every model")
    parser.add_argument("--resume", action="store_true", help="keep what --json has, run what it lacks")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit per model")
    parser.add_argument("--gib", type=float, default=8.0, help="memory limit per model")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    return parser


def _read(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    return {f"{r['group']}/{r['name']}": r for r in json.loads(path.read_text())["results"]}


def _write(path: Path, results: dict[str, Any]) -> None:
    facts = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    text = json.dumps({"facts": facts, "results": list(results.values())}, indent=1)
    for place in (
        Path.cwd(),
        Path(sysconfig.get_path("purelib")),
    ):  # errors and notes name files: not by this machine's
        text = text.replace(f"{place}/", "")
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
