"""Runs subjects under setups, prints a line for each and a table by kind, and writes the records as JSON."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks import pairs
from benchmarks.strangers.compare import Result, Setup, Subject, as_record, run_subject

BAD = ("wrong", "raw error")


def options(description: str) -> argparse.ArgumentParser:
    """Return the options that every benchmark of strangers has."""
    parser = pairs.parser(description)
    parser.add_argument("--only", default="", help="a regular expression of names or kinds")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run_all(
    cases: Iterable[tuple[Subject, Setup]], *, only: str = "", seed: int = 0, json_file: Path | None = None
) -> list[Result]:
    """Run the cases whose name or kind matches; the file is written after every case."""
    torch.set_num_threads(1)
    results: list[Result] = []
    for subject, setup in cases:
        if not re.search(only, f"{subject.kind}/{subject.name}"):
            continue
        result = run_subject(subject, setup, seed)
        results.append(result)
        print(line(result), flush=True)
        if json_file is not None:
            write(json_file, results)
    return results


def line(result: Result) -> str:
    """Return one result as a line."""
    head = f"{result.kind}/{result.name} [{result.setup}]: {result.answer} ({result.chunks} chunks, {result.share:.0%})"
    tail = " | ".join(part for part in (result.off, result.error) if part)
    return f"{head}, {result.outcome}, {result.cpu_s} s {tail}"


def write(path: Path, results: Sequence[Result]) -> None:
    """Write summary and records."""
    records = [as_record(result) for result in results]
    path.write_text(json.dumps({"summary": summary(results), "cases": records}, indent=1) + "\n")


def summary(results: Sequence[Result]) -> dict[str, int]:
    """Return how many cases had which answer and outcome."""
    counts = Counter(result.outcome for result in results) + Counter(
        result.answer for result in results if result.outcome == "equal"
    )
    return {"cases": len(results), **dict(sorted(counts.items()))}


def table(results: Sequence[Result]) -> str:
    """Return a row per kind: how many were equal, refused, wrong, raw, and how many pipeline."""
    rows = []
    for kind in dict.fromkeys(result.kind for result in results):
        members = [result for result in results if result.kind == kind]
        outcomes = Counter(result.outcome for result in members)
        piped = sum(result.outcome == "equal" and result.answer == "pipelines" for result in members)
        rows.append(
            [
                kind,
                len(members),
                piped,
                *(outcomes[name] for name in ("equal", "refused", "wrong", "raw error", "plain fails")),
            ]
        )
    rows.append(["all", *(sum(row[column] for row in rows) for column in range(1, 8))])
    return tabulate(
        rows, headers=["kind", "cases", "pipeline", "equal", "refused", "wrong", "raw error", "plain fails"]
    )


def exit_code(results: Sequence[Result]) -> int:
    """Return 1 where anything was wrong or a raw error."""
    return int(any(result.outcome in BAD for result in results))
