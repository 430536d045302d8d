"""Published memory of torchgpipe's runs against what is predicted for them, row by row: modelled or not, and why.

    python -m benchmarks.published [--json FILE]

Nothing is fitted to a row. Predictions come from the fake pass and the allocator's simulation
(:mod:`benchmarks.published_torchgpipe`; recording the networks takes minutes).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import cost_models
from benchmarks import pairs
from benchmarks.published_torchgpipe import experiments, predicted, stages_of

DATA = Path(__file__).parent / "data" / "published_memory_and_speed.json"
ASKED = 0.10
GIB, GB = 2**30, 10**9

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One published figure, and what is predicted for it.

    Attributes:
        published: in ``unit``; None where the source has none.
        predicted: in ``unit``; None where it is not modelled.
        why: why it is not modelled, what was assumed, or why it misses.
    """

    row: str
    figure: str
    unit: str
    published: float | None
    predicted: float | None
    why: str

    @property
    def error(self) -> float | None:
        """Predicted over published, less one."""
        return None if self.published is None or self.predicted is None else self.predicted / self.published - 1

    @property
    def within(self) -> bool | None:
        """Whether it is as near as asked; None where there is nothing to compare."""
        return None if self.error is None else abs(self.error) <= ASKED


def rows() -> list[Row]:
    """Return the published rows."""
    found: list[Row] = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
    return found


_LEFT_OUT = "for unknown: cuDNN 7's scratch, and blocks whose copies were not done when the host went on"
_HUANG = "Huang et al.'s own TensorFlow program: "


def lines(row: Row) -> Iterator[Line]:
    """Yield parameters, and reserved bytes over all devices; theirs for AmoebaNet-D less 12 bytes per parameter."""
    name = row["model"]
    experiment = experiments()[name]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in experiment.make().parameters())
    yield Line(name, "parameters", "M", row["params_M"], parameters / 1e6, "counted on our own definition")
    if "model_GiB" in row:
        model = parameters * experiment.state_bytes
        yield Line(name, "model", "GiB", row["model_GiB"], model / GIB, "parameter, gradient, RMSprop's average")
        why = _HUANG + "12 bytes per parameter"
        yield Line(name, "model (GPipe paper)", "GB", row["gpipe_paper_model_GB"], model / GB, why)
        why = f"not modelled: {_HUANG}how it allocates is not published"
        yield Line(name, "activations (GPipe paper)", "GB", row["gpipe_paper_act_GB"], None, why)
    found = predicted(experiment, stages_of(experiment))
    reserved = found.reserved_bytes / GIB
    if (total := _total(row)) is None:
        usable = cost_models.device("P40-24GB").usable_bytes or 0
        fits = "fits" if found.reserved_bytes <= usable else "does not fit"
        why = f"published: out of memory; predicted: {fits} on a P40, which has {usable / GIB:.1f} GiB to give"
        yield Line(name, "reserved", "GiB", None, reserved, why)
        return
    yield Line(name, "reserved", "GiB", total, reserved, f"not counted, {_LEFT_OUT}")
    if "peak_act_GiB" in row:
        why = "the line above less the model: all its error, on a smaller number; not counted, " + _LEFT_OUT
        yield Line(name, "reserved less model", "GiB", row["peak_act_GiB"], reserved - found.model_bytes / GIB, why)


def _total(row: Row) -> float | None:
    if "total_reserved_GiB" in row:
        return float(row["total_reserved_GiB"])
    return None if row["peak_act_GiB"] is None else float(row["model_GiB"] + row["peak_act_GiB"])


def shown(line: Line) -> dict[str, str]:
    """Return a line of the table."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    verdict = {True: "yes", False: "yes, misses", None: "yes" if line.predicted is not None else "no"}[line.within]
    return {
        "row": line.row,
        "figure": line.figure,
        "unit": line.unit,
        "published": number(line.published),
        "predicted": number(line.predicted),
        "error": "" if line.error is None else f"{line.error:+.1%}",
        "modelled": verdict,
        "why": line.why,
    }


def checks(found: Sequence[Line]) -> list[pairs.Check]:
    """Return what is asked of the modelled figures."""
    return [
        pairs.at_most(f"{line.row}: {line.figure}", ASKED, abs(line.error)) for line in found if line.error is not None
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write all figures as JSON."""
    parser = pairs.parser(__doc__)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: list[Line] = []
    for row in rows():
        print(f"\r\033[K{row['model']}", end="", file=sys.stderr, flush=True)
        found += lines(row)
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(pairs.table([shown(line) for line in found]))
    pairs.conclude(
        arguments.json,
        benchmark="published",
        settings={"asked": ASKED},
        machine=pairs.facts(),
        figures=[{**asdict(line), "error": line.error, "modelled": line.predicted is not None} for line in found],
        checks=checks(found),
    )


if __name__ == "__main__":
    main()
