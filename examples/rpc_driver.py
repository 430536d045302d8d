"""A driver that trains DistResNet50 on two workers by remote calls, as PyTorch's tutorial on RPC pipelines does.

    python examples/rpc_driver.py

There are three processes. The driver has the data and no stage; each worker holds the pipe of one rank, and runs a step
when the driver says so. In the tutorial the driver sends every microbatch through every shard and
``torch.distributed.autograd`` takes the gradients back. Here a remote call is a whole step, in which the workers send
each other what crosses the cut, forwards and backwards overlap, and each worker's optimizer is an ordinary one.

``torch.distributed.rpc`` is stable and in maintenance mode. Here it carries tensors of the CPU only; what crosses the
cut travels over gloo or NCCL.
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
from torch.distributed import rpc

from autosplit import autosplit
from examples import comparison
from examples.comparison import Outcome
from examples.dist_resnet50 import CLASSES, LOSS, LR, one_hot_batches
from examples.models import ResNet
from examples.resnet50_two_stages import train_on_microbatches


class Worker:
    """The part of one rank, which lives in a worker and is called by the driver."""

    def __init__(self, rank: int, store: str, workers: int, model: nn.Module, sample: Tensor, splits: int) -> None:
        dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=workers)
        self.pipe = autosplit(model, devices="torchrun", chunks=splits, batch_norm="micro", sample=sample)
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=LR)

    def train_step(self, inputs: Tensor, targets: Tensor) -> float:
        """Run this rank's part of a step; return the loss, which is the same on every rank."""
        self.optimizer.zero_grad()
        loss = self.pipe.train_step(inputs, target=targets, loss_fn=LOSS)
        self.optimizer.step()
        return loss.item()


class DistResNet50:
    """What the driver holds of a model: a reference to each worker's part."""

    def __init__(self, model: nn.Module, sample: Tensor, *, workers: int, splits: int, store: str) -> None:
        given = store, workers, model, sample, splits
        self.ranks = [rpc.remote(f"worker{rank}", Worker, args=(rank, *given)) for rank in range(workers)]

    def train_step(self, inputs: Tensor, targets: Tensor) -> float:
        """Run one step on all workers at the same time; return the loss of the batch."""
        calls = [rank.rpc_async().train_step(inputs, targets) for rank in self.ranks]
        return torch.futures.wait_all(calls)[0]


def drive(options: argparse.Namespace, store: str) -> Outcome:
    """Train on the workers, and plain in the driver; compare the losses."""
    comparison.prepare()
    dtype = getattr(torch, options.dtype)
    batches = one_hot_batches(image_size=64, rows=options.batch, count=options.steps, dtype=dtype)
    model = ResNet(num_classes=CLASSES, width=options.width, blocks=tuple(options.blocks)).to(dtype)
    remote = DistResNet50(model, batches[0].inputs, workers=options.workers, splits=options.splits, store=store)
    losses = tuple(remote.train_step(batch.inputs, batch.targets) for batch in batches)
    plain = train_on_microbatches(copy.deepcopy(model), batches, chunks=options.splits, lr=LR, loss_fn=LOSS)
    return Outcome({"plain": plain, "by workers": losses}, {"loss": comparison.loss_difference(plain, losses)})


def work(index: int, options: argparse.Namespace, folder: str) -> None:
    """Run one process: the driver is the first one, the workers wait for its calls."""
    name = f"worker{index - 1}" if index else "driver"
    settings = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=600.0)
    rpc.init_rpc(name, rank=index, world_size=1 + options.workers, rpc_backend_options=settings)
    equal = True
    if name == "driver":
        outcome = drive(options, f"{folder}/pipe")
        comparison.print_losses(outcome.losses)
        comparison.print_verdict(outcome)
        equal = outcome.equal
    rpc.shutdown()
    sys.exit(0 if equal else 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Start the driver and its workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes with a stage each")
    parser.add_argument("--splits", type=int, default=4, help="microbatches per batch")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="images per batch")
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer; 64 is ResNet-50's")
    parser.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 6, 3], help="bottlenecks per layer")
    comparison.add_dtype(parser)
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(options, folder), nprocs=1 + options.workers)


if __name__ == "__main__":
    main()
