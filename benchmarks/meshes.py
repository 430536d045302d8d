"""How close ``mesh="auto"`` comes to the best of all meshes, and what it takes.

    python -m benchmarks.meshes [--only NAME ...] [--json FILE]

Every pair is a decoder and a machine on paper. The sweep searches each mesh, ZeRO stage and size of microbatches for
its best cut, schedule and recompute and replays it, whatever its bound says; ``above`` is the planner's step over the
sweep's. Seconds are of this process's CPU; both start from the recording, whose seconds stand beside. The file is
written after every pair.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autosplit.options import Options, Sample
from autosplit.planning.paper import prepare, stand_ins
from autosplit.planning.parallel.search import MeshRequest, MeshSearch
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.request import chosen
from benchmarks.layout_models import SHAPES, Shape, build, gpt, llama, loss
from cost_models import machine
from cost_models.registry import spread

RESULTS = Path(__file__).parent / "results" / "meshes.json"


@dataclass(frozen=True)
class Pair:
    """A model, devices, and the rows of a global batch."""

    shape: Shape
    devices: str
    rows: int
    precision: str = "bf16_fp32_master"
    sweep: bool = True


_TINY = llama(8, 1024, 16, 8, 2816, 32000).at(1024)
PAIRS = {
    "tiny Llama on 8 H100": Pair(_TINY, "8xH100-SXM5-80GB", 64),
    "tiny Llama on 4 L4": Pair(_TINY, "4xL4-24GB", 16),
    "tiny Llama on 8 V100, few rows": Pair(_TINY, "8xV100-SXM2-32GB", 8, "amp_fp16"),
    "wide GPT on 8 L4": Pair(gpt(8, 4096, 32, length=1024), "8xL4-24GB", 32),
    "wide GPT on 8 A100-40GB": Pair(gpt(12, 8192, 64), "8xA100-SXM4-40GB", 32),
    "wide GPT on 16 A100-40GB": Pair(gpt(12, 8192, 64), "16xA100-SXM4-40GB", 64),
    "Llama2-7B on 8 H100": Pair(SHAPES["Llama2-7B"], "8xH100-SXM5-80GB", 32),
    "wide Llama on 8 H100, long rows": Pair(llama(8, 8192, 64, 8, 28672, 32000).at(8192), "8xH100-SXM5-80GB", 8),
    "Llama2-70B on 64 H100": Pair(SHAPES["Llama2-70B"], "64xH100-SXM5-80GB", 256, sweep=False),
}


def measured(pair: Pair) -> dict[str, Any]:
    """Return the planner's step beside the sweep's, and what each takes."""
    own = spread(machine(pair.devices))

    def choices(*, devices: int) -> dict[str, Any]:
        return chosen(
            devices=devices,
            chunks="auto",
            schedule="auto",
            virtual_stages=1,
            recompute="auto",
            memory_limit=None,
            reserve="3%",
            optimizer="adamw",
            precision=pair.precision,
        )

    begin = time.process_time()
    options = Options(stand_ins(own), **choices(devices=len(own)), measure=False, machine=own, processes=True)
    sample = Sample(torch.zeros(pair.rows, pair.shape.length, dtype=torch.int64, device="meta"))
    paper = prepare(build(pair.shape), sample, options, loss_fn=loss)
    recorded = time.process_time()
    found = {"recording_s": round(recorded - begin, 1)}
    for name in ("planner", "sweep") if pair.sweep else ("planner",):
        begin = time.process_time()
        fresh = replace(paper, recorded=RecordedModel(paper.recorded.model, paper.recorded.found))
        search = MeshSearch(MeshRequest(fresh, own, choices, "auto", "auto", True), exhaustive=name == "sweep")
        best = search.run()
        found[name] = {
            "mesh": f"{best.mesh.parallel}, ZeRO-{best.mesh.parallel.zero}",
            "step_s": best.step_s,
            "verdict": best.finished.verdict,
            "searched": len(search.found),
            "left": len(search.left),
            "cpu_s": round(time.process_time() - begin, 1),
        }
    if pair.sweep:
        found["above"] = found["planner"]["step_s"] / found["sweep"]["step_s"] - 1
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the pairs that are asked for, and write the file anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PAIRS), help="pairs whose name has one of these texts")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    results = json.loads(asked.json.read_text()) if asked.json.is_file() else {}
    for name, pair in PAIRS.items():
        if any(text in name for text in asked.only):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                results[name] = measured(pair)
            print(name, results[name], flush=True)
            asked.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
