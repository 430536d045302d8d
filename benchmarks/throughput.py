"""Published throughput of data-parallel runs beside what the planner says, with no constant fitted.

    python -m benchmarks.throughput [--only TEXT ...] [--every N]

Rows are those of MosaicML's tables (``data/mosaicml_throughput.csv``): MPT of 125M to 70B parameters, sequences of 512
to 65,536 tokens, 8 to 512 A100 and H100, sharded by FSDP. A step is predicted for 2 and for 4 blocks and is linear in
their number, as there is no pipeline. Printed are predicted over published seconds, by table: as they are, and after
one constant per table.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from autosplit.parallel import Parallel
from autosplit.planning.plan.write import Writer
from autosplit.planning.request import settle, sizes_of
from autosplit.planning.search.make import as_given
from benchmarks.layout_models import gpt
from benchmarks.layouts import Row, published_cut, request_of

DATA = Path(__file__).parent / "data" / "mosaicml_throughput.csv"
RESULTS = Path(__file__).parent / "results" / "throughput.json"
_DEVICES = {"h100_80gb": "H100-SXM5-80GB", "a100_80gb": "A100-SXM4-80GB", "a100_40gb": "A100-SXM4-40GB"}
_SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width and heads: ``scripts/train/yamls/pretrain`` of the same repository."""
_WORDS, _BLOCKS = 50368, (2, 4)


def rows() -> Iterator[tuple[str, Row]]:
    """Yield each row with the name of its table."""
    lines = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    for entry in csv.DictReader(lines):
        gpus, micro, count = (int(entry[name]) for name in ("gpus", "micro_batch", "microbatches"))
        layers, width, heads = _SHAPES[entry["model"]]
        precision = "fp8" if entry["precision"] == "amp_fp8" else "bf16_fp32_master"
        table = f"{entry['gpu']} {precision}"
        name = f"{table}: {entry['model']} at {entry['seq']} on {gpus}, {micro} x {count}, {entry['recompute']}"
        batch = gpus * micro * count
        yield (
            table,
            Row(
                name=name,
                source="mosaicml",
                shape=replace(gpt(layers, width, heads, _WORDS, bias=False), length=int(entry["seq"])),
                device=_DEVICES[entry["gpu"]],
                parallel=Parallel(gpus, 1, 1, 3, False, "torchtitan"),
                micro_batch=micro,
                batch=batch,
                schedule="1f1b",
                virtual=1,
                recompute="block" if entry["recompute"] == "True" else "never",
                precision=precision,
                published_s=batch * int(entry["seq"]) / (gpus * float(entry["tokens_per_s_per_gpu"])),
            ),
        )


def predicted_s(row: Row) -> float:
    """Return the step of a row, from those of its model with few blocks."""
    few, more = (_step_s(replace(row, shape=replace(row.shape, layers=count))) for count in _BLOCKS)
    return few + (row.shape.layers - _BLOCKS[0]) / (_BLOCKS[1] - _BLOCKS[0]) * (more - few)


def _step_s(row: Row) -> float:
    request = request_of(row, own=False)
    options, paper = request.options(row.parallel), request.paper
    sizes = sizes_of(row.batch // row.parallel.dp, options.chunks, paper.recorded.trace.graph.min_rows)
    case = paper.recorded.problem(options, sizes)
    case = case.under(options, settle(options, parts=1, microbatches=len(sizes)))
    return Writer(case, as_given(case, published_cut(row), (row.recompute,), stages=1)).plan().step_s


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Return how far predicted over published is from 1: as it is, and after one constant for all."""
    middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
    after = sorted(abs(ratio / middle - 1) for ratio in ratios)
    figures = {
        "least": min(ratios),
        "mean": middle,
        "most": max(ratios),
        "within_20%": sum(abs(ratio - 1) <= 0.2 for ratio in ratios) / len(ratios),
        "median_after": median(after),
        "p90_after": after[min(len(after) - 1, int(0.9 * len(after)))],
    }
    return {"rows": len(ratios), **{name: round(value, 3) for name, value in figures.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the rows that are asked for, and write all that are known to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name has one of these texts")
    parser.add_argument("--every", type=int, default=1, help="of these only each Nth")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    kept: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json.is_file() else {"rows": {}}
    chosen = [(table, row) for table, row in rows() if any(text in row.name for text in asked.only)]
    for _, row in chosen[:: asked.every]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            kept["rows"][row.name] = round(predicted_s(row) / row.published_s, 4)
        print(row.name, kept["rows"][row.name], flush=True)
    tables: dict[str, list[float]] = {}
    for table, row in rows():
        if row.name in kept["rows"]:
            tables.setdefault(table, []).append(kept["rows"][row.name])
    kept["tables"] = {table: summary(ratios) for table, ratios in tables.items()}
    print(json.dumps(kept["tables"], indent=1))
    asked.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
