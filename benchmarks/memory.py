"""Predicted against measured memory: the peak of a training step of the plain model.

    python -m benchmarks.memory [--family gpt2 unet] [--precision fp32 amp_bf16] [--recompute never block]
                                [--optimizer sgd adam adafactor] [--json FILE]

Without choices: eight families, both precisions, with and without recompute per block, both optimizers: 64 cells.
The peaks of a pipe's stages are :mod:`benchmarks.memory_pipe`'s.

A prediction is made from a recording on the meta device: nothing is allocated for it, and nothing in it is fitted to
these families. What is measured on the CPU are the allocator's own events (``torch.profiler`` with one thread), so the
machine's load does not matter. Both count parameters, buffers, optimizer state and inputs alike. ``error`` is of the
whole peak, ``dynamic`` of what is above parameters, buffers and state. Where bf16 is emulated it takes a minute per
step; a quarter of the rows is used for it.

CUDA devices are measured by ``python -m benchmarks.gpu.run --part memory``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from benchmarks import pairs
from benchmarks.families import Family, families
from benchmarks.memory_step import OPTIMIZERS, Way, step_lines
from benchmarks.memory_subject import Line, Precision, Subject, recorded

_MIB = 2**20


@dataclass(frozen=True)
class Work:
    """One family in one precision, recorded when it is first needed."""

    family: Family
    precision: Precision

    @cached_property
    def subject(self) -> Subject:
        """The recording."""
        return recorded(self.family, self.precision)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table and what is asked, and write all figures as JSON."""
    arguments = _arguments(argv)
    torch.set_num_threads(1)
    machine = pairs.facts()
    found: list[Line] = []
    for lines in _lines(arguments):
        for line in lines:
            print(text(line), flush=True)
        found += lines
    print(f"\n{pairs.facts_text(machine)}\n\n{pairs.table([row(line) for line in found])}\n")
    pairs.conclude(
        arguments.json,
        benchmark="memory",
        settings={"rows": "each figure's own", "threads": torch.get_num_threads()},
        machine=machine,
        figures=[{**asdict(line), "error": line.error, "dynamic_error": line.dynamic_error} for line in found],
        checks=checks(found),
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = pairs.parser(__doc__)
    parser.add_argument("--family", nargs="+", choices=list(families()), default=list(families()))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "amp_bf16"), default=["fp32", "amp_bf16"])
    parser.add_argument("--recompute", nargs="+", choices=("never", "block"), default=["never", "block"])
    parser.add_argument("--optimizer", nargs="+", choices=list(OPTIMIZERS), default=["sgd", "adam"])
    return parser.parse_args(argv)


def _lines(arguments: argparse.Namespace) -> Iterator[list[Line]]:
    """Yield lines as they are made."""
    works = [Work(families()[name], precision) for precision in arguments.precision for name in arguments.family]
    for work, recompute in itertools.product(works, arguments.recompute):
        rows = work.family.rows if work.precision == "fp32" else max(1, work.family.rows // 4)
        way = Way(work.precision, recompute, rows)
        yield step_lines(work.subject, way, optimizers=arguments.optimizer)


def text(line: Line) -> str:
    """Return a line of the report while it is made."""
    return "  ".join(row(line).values())


def row(line: Line) -> dict[str, str]:
    """Return a row of the table."""
    return {
        "cell": line.cell,
        "rows": str(line.rows),
        "static MiB": f"{line.static_bytes / _MIB:.2f}",
        "predicted MiB": f"{line.predicted_bytes / _MIB:.2f}",
        "measured MiB": f"{line.measured_bytes / _MIB:.2f}",
        "error": f"{line.error:+.3%}",
        "dynamic": f"{line.dynamic_error:+.3%}",
        "asked": f"{line.asked:.1%}",
    }


def checks(lines: Sequence[Line]) -> list[pairs.Check]:
    """Return what is asked of every cell, by its size."""
    return [pairs.at_most(line.cell, line.asked, abs(line.error)) for line in lines]


if __name__ == "__main__":
    main()
