"""Train a small GPT over the processes of torchrun: what a training script of several processes needs, and no more.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_torchrun.py --folder checkpoints

Every process runs every line. Each has the same model, the same batches and the same random state, all from one seed,
so that the loss is that of one process, dropout included. After a restart, by torchrun or by hand, training goes on
from the last checkpoint to the same losses, also in another number of processes.
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
from autosplit.distributed import checkpoint
from examples import data
from examples.models import GPT, GPTConfig


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [rows, length, vocab] against token numbers [rows, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(*, steps: int, rows: int, chunks: int, folder: Path, save_every: int) -> None:
    """Train up to ``steps``, from the newest checkpoint of the folder where it has one."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(dropout=0.1))
    batches = list(data.text_batches(data.python_text(), rows=rows, length=32, count=steps))
    pipe = autosplit(model, devices="torchrun", chunks=chunks, sample=batches[0].inputs)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    start, is_first = 0, dist.get_rank() == 0
    if checkpoint.latest(folder) is not None:
        others = checkpoint.restore(folder, pipe, optimizer)
        start = others["step"]
        scheduler.load_state_dict(others["scheduler"])
        torch.set_rng_state(others["random"])
        if is_first:
            print(f"goes on after step {start}", flush=True)
    for step, batch in enumerate(batches[start:], start=start + 1):
        optimizer.zero_grad()
        loss = pipe.train_step(batch.inputs, target=batch.targets, loss_fn=loss_fn)
        norm = pipe.clip_grad_norm_(1.0)  # by the norm of all ranks' gradients together
        optimizer.step()
        if is_first:
            lr = scheduler.get_last_lr()[0]
            print(f"step {step}: loss {loss.item()!r}, gradient norm {norm.item()!r}, lr {lr:.2e}", flush=True)
        scheduler.step()
        if step % save_every == 0 or step == steps:
            others = {"step": step, "scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}
            checkpoint.save(folder, step, pipe, optimizer, others=others)


def main(argv: Sequence[str] | None = None) -> None:
    """Train in this process of ``torchrun``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are; on a disk of all ranks")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all")
    parser.add_argument("--rows", type=int, default=16, help="rows per batch")
    parser.add_argument("--chunks", type=int, default=4, help="microbatches per batch")
    train(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
