"""Verdicts on runs that are known to have run, or to have died out of memory; nothing is fitted to single rows.

    python -m benchmarks.edges [--only TEXT ...] [--every N]

Rows are those of MosaicML's tables (`benchmarks.throughput`), which all ran, and of its sweep over microbatches without
recompute, of which those that died are not in its table (``act_ckpt_optimize.sh`` and ``ack_ckpt_limits.md`` beside it,
commit beb8dee69; microbatches of 1, 2, 4 and 8). Its loss works in place (``fused_crossentropy``). Each item of a peak
is predicted for 4 and for 8 blocks and is linear in their number.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from autosplit.planning.peaks import PeakRange
from autosplit.planning.plan.fields import MemoryItem
from autosplit.planning.plan.stage_memory import StageMemory
from autosplit.planning.plan.write import Writer
from autosplit.planning.request import settle, sizes_of
from autosplit.planning.search.make import as_given
from benchmarks import throughput
from benchmarks.layouts import Row, published_cut, request_of

RESULTS = Path(__file__).parent / "results" / "edges.json"
_BLOCKS = (4, 8)
_DIED = {"7b at 2048 on 8": 8, "13b at 2048 on 8": 4}
"""The microbatch of 80 GB A100 without recompute at which a row of the tables died."""


def in_place(logits: Tensor, target: Tensor) -> Tensor:
    """Return a loss that keeps nothing beside the logits."""
    return logits.sum()


def rows() -> Iterator[tuple[bool, Row]]:
    """Yield every row, with whether it ran."""
    for _, row in throughput.rows():
        yield True, row
        micro = next((micro for text, micro in _DIED.items() if f": {text}" in row.name), None)
        if micro and "a100_80gb bf16" in row.name and row.recompute == "never":
            name = f"{row.name}, with {micro} rows"
            batch = row.batch // row.micro_batch * micro
            yield False, replace(row, name=name, micro_batch=micro, batch=batch)


def memory_of(row: Row) -> StageMemory:
    """Return a row's memory, from that of its model with few blocks."""
    few, more = (_few(replace(row, shape=replace(row.shape, layers=count))) for count in _BLOCKS)
    part = (row.shape.layers - _BLOCKS[0]) / (_BLOCKS[1] - _BLOCKS[0])
    sizes: dict[str, list[float]] = {}
    for weight, memory in ((1 - part, few), (part, more)):
        for item in memory.items:
            low, high = sizes.get(item.name, (0.0, 0.0))
            sizes[item.name] = [low + weight * item.low_bytes, high + weight * item.high_bytes]
    items = [
        MemoryItem(name=name, low_bytes=round(low), high_bytes=round(high), source="")
        for name, (low, high) in sizes.items()
    ]
    found = PeakRange.of(items)
    peak = items[0].low_bytes
    return more.model_copy(update={"low_bytes": found.low_bytes, "high_bytes": found.high_bytes, "peak_bytes": peak})


def _few(row: Row) -> StageMemory:
    request = request_of(row, own=False, criterion=in_place)
    options, paper = request.options(row.parallel), request.paper
    sizes = sizes_of(row.batch // row.parallel.dp, options.chunks, paper.recorded.trace.graph.min_rows)
    case = paper.recorded.problem(options, sizes)
    case = case.under(options, settle(options, parts=1, microbatches=len(sizes)))
    [stage] = Writer(case, as_given(case, published_cut(row), (row.recompute,), stages=1)).plan().stages
    return stage.memory


def main(arguments: list[str] | None = None) -> None:
    """Judge the rows that are asked for, and write all that are known to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name has one of these texts")
    parser.add_argument("--every", type=int, default=1, help="of these only each Nth, and all that died")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    kept: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json.is_file() else {"rows": {}}
    chosen = [(ran, row) for ran, row in rows() if any(text in row.name for text in asked.only)]
    for index, (ran, row) in enumerate(chosen):
        if ran and index % asked.every:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            memory = memory_of(row)
        share = memory.peak_bytes / (memory.capacity_bytes or 1)
        kept["rows"][row.name] = [ran, memory.verdict, memory.odds, round(share, 3)]
        print(row.name, kept["rows"][row.name], flush=True)
    counts = Counter(f"{'ran' if ran else 'died'}: {verdict}" for ran, verdict, *_ in kept["rows"].values())
    kept["counts"] = dict(sorted(counts.items()))
    print(json.dumps(kept["counts"], indent=1))
    asked.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
