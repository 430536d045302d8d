"""What profiling a large model costs, on the meta device, given its recording.

    python -m benchmarks.profile [--repeats 3] [--json FILE]

Cases (each in a process of its own; transformers comes with the `bench` extra):

    llama-70b    80 layers, 8192 wide, sequence 4096, bf16: FLOPs, times, saved and transient bytes of every node
    moe-1t       61 layers of 384 experts, a trillion parameters: the same
    stages       llama-70b cut into 8 equal stages: what each allocates and frees, replayed under 1F1B

``seconds`` are CPU seconds without the recording; ``peak_bytes`` is how far the process's resident memory grew.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosplit.memory.pieces import StageTraces
from autosplit.memory.replay import StaticBytes, replay
from autosplit.options import Sample
from autosplit.profile.blocks import block_trace
from autosplit.profile.combine import profile
from autosplit.profile.stage_graph import stage_graph
from autosplit.profile.stage_trace import How
from autosplit.schedule.catalog import build
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from benchmarks.record import llama_70b_model

DEVICE = "H100-SXM5-80GB"
ROWS, BATCH, LENGTH, STAGES = 1, 4, 4096, 8
ASKED = {"llama-70b": (2.0, 300e6), "moe-1t": (10.0, None), "stages": (None, None)}
"""Most seconds and most bytes."""


def _recorded(model: nn.Module) -> TracedGraph:
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    return trace(model, Sample(input_ids=tokens, use_cache=False)).graph


def _llama() -> TracedGraph:
    return _recorded(llama_70b_model().to(torch.bfloat16).train())


def _experts() -> TracedGraph:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_experts=384,
        num_experts_per_tok=8,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with torch.device("meta"):
        return _recorded(Qwen3MoeForCausalLM(config).to(torch.bfloat16).train())


def _profiled(graph: TracedGraph) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        found = profile(graph, rows=ROWS, batch_rows=BATCH, measure=False, device=DEVICE)
        saved = {storage: size for node in found.nodes.values() for storage, size in node.saved.items()}
        return {
            "parameters": sum(state.elements for state in found.state.values() if state.is_parameter),
            "nodes": len(found.nodes),
            "forward_flops": sum(node.forward_flops for node in found.nodes.values()),
            "saved_bytes": sum(saved.values()),
            "estimated": len(found.estimated),
        }

    return _cost(run)


def _stages(graph: TracedGraph) -> dict[str, Any]:
    names = [info.name for _, info in graph.compute_nodes()]
    cuts = [len(names) * stage // STAGES for stage in range(STAGES + 1)]

    def run() -> dict[str, Any]:
        traces = {}
        for stage in range(STAGES):
            own = stage_graph(graph, names[cuts[stage] : cuts[stage + 1]])
            flows = {info.name: True for _, info in graph.compute_nodes()}
            traces[stage] = StageTraces(never=block_trace(own, How(ROWS, input_grads=flows, kernels="cuda")))
        schedule = build("1f1b", stages=STAGES, microbatches=2 * STAGES)
        return {"peaks": replay(schedule, traces, [StaticBytes()] * STAGES).peak_bytes}

    return _cost(run)


def _cost(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    before, start = pages * resource.getpagesize(), time.process_time()
    found = run()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"seconds": time.process_time() - start, "peak_bytes": grown, **found}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "llama-70b": lambda: _profiled(_llama()),
    "moe-1t": lambda: _profiled(_experts()),
    "stages": lambda: _stages(_llama()),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per case, and write all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", choices=CASES)
    arguments = parser.parse_args(argv)
    if arguments.case:
        torch.set_num_threads(1)
        print(json.dumps(CASES[arguments.case]()))
        return
    results, checks = {}, []
    for case, (most_s, most_bytes) in ASKED.items():
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.profile", "--case", case]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            for _ in range(arguments.repeats)
        ]
        seconds, grown = (statistics.median(run[key] for run in runs) for key in ("seconds", "peak_bytes"))
        results[case] = {
            **runs[0],
            "seconds": seconds,
            "peak_bytes": grown,
            "all_seconds": [r["seconds"] for r in runs],
        }
        for name, asked, measured in (("seconds", most_s, seconds), ("bytes", most_bytes, grown)):
            if asked is not None:
                checks.append({"name": f"{case} {name}", "asked": asked, "measured": measured, "ok": measured <= asked})
        print(case, json.dumps(results[case]))
    print(*checks, sep="\n")
    if arguments.json:
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": "2 shared CPU cores"}
        text = json.dumps({"about": about, "cases": results, "checks": checks}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
