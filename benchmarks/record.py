"""What recording a model costs: seconds and memory, beside what the model itself needs.

    python -m benchmarks.record [--repeats 3] [--json FILE]

Cases (each in a process of its own; transformers comes with the `bench` extra):

    llama-70b    80 layers, 8192 wide, from its config on the meta device: recorded and classified, nothing allocated
    gpt2-small   real weights: recording at 4 x 128 tokens, then at 4 x 96, and the memory that the first one takes
    resnet50     real weights: recording at 8 x 3 x 224 x 224, and the memory that it takes

``first_s`` and ``other_length_s`` are CPU seconds of :func:`autosplit.trace.ladder.trace`; ``peak_bytes`` is how far
the process's resident memory grew while it ran. The bound on it is half the parameters plus what two rows' activations
are: what autograd saves in a forward of two rows, measured here.
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

from autosplit.options import Sample
from autosplit.trace.ladder import trace
from examples.models import GPT, GPTConfig, ResNet


def llama_70b_model() -> nn.Module:
    """Return a model of Llama-70B's shape on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model


def llama_70b() -> dict[str, Any]:
    """Record Llama-70B's shape on the meta device."""
    tokens = torch.empty(8, 2048, dtype=torch.long, device="meta")
    return _first(llama_70b_model().eval(), Sample(input_ids=tokens, use_cache=False))


def gpt2_small() -> dict[str, Any]:
    """Record GPT-2-small's shape with real weights, at two lengths."""
    torch.manual_seed(0)
    model = GPT(GPTConfig.gpt2_small())
    tokens = torch.randint(0, 50257, (4, 128))
    found = _first(model, Sample(tokens)) | _bound(model, tokens[:2])
    from autosplit import autosplit

    pipe = autosplit(model, devices=4, chunks=2, sample=tokens)
    found["other_length_s"] = _cpu_seconds(lambda: pipe.prepare(Sample(tokens[:, :96])))
    return found


def resnet50() -> dict[str, Any]:
    """Record ResNet-50 with real weights."""
    torch.manual_seed(0)
    model = ResNet()
    images = torch.randn(8, 3, 224, 224)
    return _first(model, Sample(images)) | _bound(model, images[:2])


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "llama-70b": llama_70b,
    "gpt2-small": gpt2_small,
    "resnet50": resnet50,
}


def _cpu_seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _first(model: nn.Module, sample: Sample) -> dict[str, Any]:
    before = _resident_bytes()
    wall = time.perf_counter()
    seconds = _cpu_seconds(lambda: trace(model, sample))
    return {
        "first_s": seconds,
        "first_wall_s": time.perf_counter() - wall,
        "peak_bytes": _peak_bytes() - before,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def _bound(model: nn.Module, rows: torch.Tensor) -> dict[str, Any]:
    """Return the bytes that autograd saves for two rows, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(rows)
    bound = sum(saved.values()) + sum(p.numel() * p.element_size() for p in model.parameters()) // 2
    del kept
    return {"saved_two_rows_bytes": sum(saved.values()), "bound_bytes": bound}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    results = {}
    for case in CASES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.record", "--case", case]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            for _ in range(arguments.repeats)
        ]
        results[case] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        results[case]["first_s_all"] = sorted(run["first_s"] for run in runs)
        print(case, json.dumps(results[case]))
    if arguments.json:
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": "2 shared CPU cores"}
        arguments.json.write_text(json.dumps({"about": about, "cases": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
