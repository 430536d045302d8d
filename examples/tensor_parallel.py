"""Tensor parallelism: a two-matrix MLP and self-attention, each shared by all processes, beside one process.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py
    python examples/tensor_parallel.py --processes 4

The MLP's first matrix is cut by columns and its second by rows, so that one sum over the processes is enough. The
attention has a single head, whose width is cut: each process has a part of every query and key, and scores are sums
over the processes. autosplit finds both from the recorded models; nothing here says how anything is cut.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit import autosplit
from examples import comparison
from examples.comparison import Outcome
from examples.seed_blocks import MLP, SelfAttention

TOLERANCE = 1e-6
"""The largest relative difference from one process."""


def compare(model: nn.Module, x: Tensor, *, steps: int) -> dict[str, float]:
    """Train a model over all processes and alone; return how far losses and parameters are from each other."""
    name, plain = type(model).__name__, copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    pipe = autosplit(model, mesh=mesh, chunks=2, sample=x)
    held = sum(parameter.numel() for parameter in pipe.parameters())
    losses: dict[str, list[float]] = {"plain": [], "shared": []}
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-4) for part in (plain, pipe)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(x), x)
        loss.backward()
        losses["plain"].append(loss.item())
        losses["shared"].append(pipe.train_step(x, target=x, loss_fn=nn.MSELoss()).item())
        for optimizer in optimizers:
            optimizer.step()
    whole = pipe.unsplit()
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in plain.parameters())
        print(f"{name}: {held} of {count} parameters per process")
    return {
        f"{name}: losses": comparison.loss_difference(*map(tuple, losses.values())),
        f"{name}: parameters": comparison.tensor_difference(plain.state_dict(), whole.state_dict()),
    }


def run(*, steps: int) -> bool:
    """Compare both models; tell whether they are equal to one process within TOLERANCE."""
    comparison.prepare()
    size = dist.get_world_size()
    differences = compare(MLP(4, 2 * size, 4), torch.randn(2, 4), steps=steps)
    differences |= compare(SelfAttention(3 * size), 0.1 * torch.randn(2, 16, 3 * size), steps=steps)
    if dist.get_rank() == 0:
        comparison.print_verdict(Outcome({}, differences))
    return all(difference <= TOLERANCE for difference in differences.values())


def work(rank: int, processes: int, store: str, steps: int) -> None:
    """Run in one of the processes that ``torch.multiprocessing`` has started; they meet at a file."""
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=processes)
    sys.exit(not run(steps=steps))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison in this process of ``torchrun``, or start the processes without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--processes", type=int, default=2, help="how many to start where torchrun does not")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        dist.init_process_group()
        return int(not run(steps=options.steps))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with tempfile.TemporaryDirectory() as folder:
        given = options.processes, str(Path(folder) / "store"), options.steps
        mp.spawn(work, args=given, nprocs=options.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
