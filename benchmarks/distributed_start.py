"""How a pipe of several processes starts: a GPT-2 small from meta, its memory per rank, and the time to the first step.

    python -m benchmarks.distributed_start [--ranks 4] [--layers 12]

Resident memory counts from behind a pipe of eight small layers, which loads all code; a rank may hold its stage's
parameters 1.2 times. The time is from there to the end of the first training step, beside one process with as many
lanes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.leaks import resident_kib

ROWS, LENGTH = 8, 64
MOST_MEMORY, MOST_TIME = 1.2, 1.5


def _model(layers: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))


def start(devices: Any, layers: int, folder: Path) -> None:
    """Make a pipe and run a step; write what it took."""
    import transformers

    from autosplit import autosplit, initialise

    assert transformers.GPT2LMHeadModel is not None
    torch.set_num_threads(1)
    tokens = torch.randint(50257, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    sample = {"input_ids": tokens, "labels": tokens}
    torch.manual_seed(0)
    small = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    autosplit(small, devices=devices, chunks=4, sample=torch.zeros(8, 8)).eval_step(torch.zeros(8, 8))
    imported_s = time.time()
    bare = 1024 * resident_kib()
    with torch.device("meta"):
        model = _model(layers)
    if devices != "torchrun":
        initialise(model)
    pipe = autosplit(model, devices=devices, chunks=4, sample=sample)
    planned = 1024 * resident_kib()
    made = {id(p): p.nbytes for p in pipe.parameters()}
    pipe.train_step(**sample)
    rank = dist.get_rank() if devices == "torchrun" else 0
    found = {"held": planned - bare, "own": sum(made.values()), "imported_s": imported_s, "end_s": time.time()}
    (folder / f"{devices if isinstance(devices, str) else 'one'}{rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Start both and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder is not None:
        start("torchrun" if "RANK" in os.environ else ["cpu"] * asked.ranks, asked.layers, asked.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        own = ["-m", "benchmarks.distributed_start", "--ranks", str(asked.ranks), "--layers", str(asked.layers)]
        own += ["--folder", name]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.ranks)]
        seconds = {}
        for kind, command in (("one", own), ("torchrun", [*torchrun, *own])):
            subprocess.run([sys.executable, *command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found = [json.loads(path.read_text()) for path in sorted(Path(name).glob(f"{kind}*.json"))]
            seconds[kind] = max(one["end_s"] for one in found) - min(one["imported_s"] for one in found)
            print(f"{kind}: first step after {seconds[kind]:.1f} s")
            for rank, one in enumerate(found):
                times = f"{one['held'] / one['own']:.2f}" if one["own"] else "-"
                print(f"  {rank}: {one['held'] >> 20} MiB resident for {one['own'] >> 20} MiB of parameters: {times}")
        print(f"memory asked of a rank: at most {MOST_MEMORY}")
        print(f"time: {seconds['torchrun'] / seconds['one']:.2f} of one process's (asked: at most {MOST_TIME})")


if __name__ == "__main__":
    main()
