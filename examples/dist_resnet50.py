"""DistResNet50: ResNet-50 over two processes, its batch in 1, 2, 4 and 8 splits, with the time that each takes.

    torchrun --standalone --nproc-per-node 2 examples/dist_resnet50.py
    python examples/dist_resnet50.py

The second line starts the processes itself, with ``torch.multiprocessing``. Every process runs the same code: it builds
the whole model from one seed, and ``autosplit(devices="torchrun")`` leaves it the stages of its rank. Values travel
over gloo, or over NCCL where every process has a CUDA device.

The model, the loss (MSE against one-hot labels) and the table of times are those of PyTorch's tutorial on a distributed
pipeline with RPC; its size is ``--batch 120 --image-size 128 --width 64 --dtype float32``. The times are of the steps
after the first one, in which the ranks agree on shapes. Starting and planning are not in them.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from autosplit import autosplit
from examples import comparison, data
from examples.comparison import Outcome
from examples.data import Batch
from examples.models import ResNet
from examples.resnet50_two_stages import train_on_microbatches

CLASSES = 10
LOSS = nn.MSELoss()
LR = 0.05


def one_hot_batches(*, image_size: int, rows: int, count: int, dtype: torch.dtype) -> list[Batch]:
    """Return batches of images [rows, 3, image_size, image_size] with one-hot labels [rows, 10]."""
    images = data.digits(size=image_size)
    labelled = Batch(images.inputs, F.one_hot(images.targets, CLASSES).float()).to(dtype)
    return list(data.batches(labelled, rows=rows, count=count))


def dist_resnet50(model: nn.Module, batches: Sequence[Batch], *, splits: int) -> tuple[tuple[float, ...], float]:
    """Train over all processes, each batch cut into ``splits``; return the losses and the seconds after the first."""
    pipe = autosplit(model, devices="torchrun", chunks=splits, batch_norm="micro", sample=batches[0].inputs)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=LR)
    losses, first_ended_s = [], 0.0
    for batch in batches:
        optimizer.zero_grad()
        losses.append(pipe.train_step(batch.inputs, target=batch.targets, loss_fn=LOSS).item())
        optimizer.step()
        first_ended_s = first_ended_s or time.perf_counter()
    return tuple(losses), time.perf_counter() - first_ended_s


def run(
    *, splits: Sequence[int], steps: int, batch: int, image_size: int, width: int, blocks: Sequence[int], dtype: str
) -> Outcome:
    """Train once per number of splits over all processes, and plain on rank 0, which prints times and differences."""
    comparison.prepare()
    precision = getattr(torch, dtype)
    batches = one_hot_batches(image_size=image_size, rows=batch, count=steps, dtype=precision)
    model = ResNet(num_classes=CLASSES, width=width, blocks=tuple(blocks)).to(precision)
    outcome = Outcome({}, {})
    for count in splits:
        losses, seconds = dist_resnet50(copy.deepcopy(model), batches, splits=count)
        if dist.get_rank() == 0:
            print(f"number of splits = {count}, execution time = {seconds}", flush=True)
            plain = train_on_microbatches(copy.deepcopy(model), batches, chunks=count, lr=LR, loss_fn=LOSS)
            difference = comparison.loss_difference(plain, losses)
            outcome = Outcome(
                {**outcome.losses, f"plain, {count}": plain, f"pipelined, {count}": losses},
                {**outcome.differences, f"losses over {steps} steps, number of splits = {count}": difference},
            )
    if dist.get_rank() == 0:
        comparison.print_verdict(outcome)
    return outcome


def work(rank: int, processes: int, store: str, options: argparse.Namespace) -> None:
    """Run in one of the processes that ``torch.multiprocessing`` has started; they meet at a file."""
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=processes)
    sys.exit(run(**vars(options)).exit_code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison in this process of ``torchrun``, or start the processes without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of microbatches to try")
    parser.add_argument("--steps", type=int, default=4, help="batches per number of splits")
    parser.add_argument("--batch", type=int, default=16, help="images per batch")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of an image")
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer; 64 is ResNet-50's")
    parser.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 6, 3], help="bottlenecks per layer")
    parser.add_argument("--processes", type=int, default=2, help="how many to start where torchrun does not")
    comparison.add_dtype(parser)
    options = parser.parse_args(argv)
    processes = options.__dict__.pop("processes")
    if "RANK" in os.environ:
        dist.init_process_group()
        return run(**vars(options)).exit_code
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(processes, str(Path(folder) / "store"), options), nprocs=processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
