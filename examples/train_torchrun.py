"""Train a small GPT over the processes of torchrun: what a training script of several processes needs, and no more.

    torchrun --standalone --nproc-per-node 2 examples/train_torchrun.py

Every process runs every line. Each has the same model, the same batches and the same random state, all from one seed,
so that the loss is that of one process, dropout included. Its optimizer, its state and its file are of its own stages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autosplit import autosplit
from examples import data
from examples.models import GPT, GPTConfig


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [rows, length, vocab] against token numbers [rows, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(*, steps: int, rows: int, chunks: int, folder: Path) -> None:
    """Train, and write the state of this rank's part."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(dropout=0.1))
    batches = list(data.text_batches(data.python_text(), rows=rows, length=32, count=steps))
    pipe = autosplit(model, devices="torchrun", chunks=chunks, sample=batches[0].inputs)
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = pipe.train_step(batch.inputs, target=batch.targets, loss_fn=loss_fn)
        norm = pipe.clip_grad_norm_(1.0)  # by the norm of all ranks' gradients together
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item()!r}, gradient norm {norm:.3f}, lr {scheduler.get_last_lr()[0]:.2e}")
        scheduler.step()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(pipe.state_dict(), folder / f"rank-{rank}.pt")
    print(f"rank {rank} wrote {len(pipe.state_dict())} tensors", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Train in this process of ``torchrun``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=16, help="rows per batch")
    parser.add_argument("--chunks", type=int, default=4, help="microbatches per batch")
    parser.add_argument("--folder", type=Path, default=Path("trained"), help="where the state is written")
    train(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
