"""Data parallelism: a linear layer and a small network, with rows of their own in every process, beside one process.

    torchrun --standalone --nproc-per-node 4 examples/data_parallel.py

The layer is that of PyTorch's DataParallel demonstration: of its 30 rows every process gets some, and prints how many
it sees. The network of two layers trains for a hundred steps on batches of 64 rows, of which every process has its own;
the loss is that of all rows, the same in every process.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit import PipelinedModule, autosplit
from examples import comparison
from examples.comparison import Outcome
from examples.data import Batch
from examples.seed_blocks import Model, Net


def replicated(model: nn.Module, sample: Tensor, *, chunks: int) -> PipelinedModule:
    """Return the model, whole in every process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return autosplit(model, mesh=mesh, chunks=chunks, sample=sample, outputs="all")


def own_rows(tensor: Tensor) -> Tensor:
    """Return the rows of this process."""
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def compare_rows(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Give every process its rows of a batch; return how far its outputs are from those of the whole batch."""
    own = own_rows(x)
    outputs = replicated(copy.deepcopy(model), own, chunks=1)(own)
    print(f"in rank {dist.get_rank()}: input size {list(own.shape)} output size {list(outputs.shape)}", flush=True)
    return {"outputs": comparison.tensor_difference({"y": own_rows(model(x))}, {"y": outputs})}


def compare_training(model: nn.Module, *, steps: int, chunks: int) -> dict[str, float]:
    """Train with the rows of each process, and with all of them at once; return the difference of the losses."""
    batches = [Batch(torch.randn(64, 10), torch.randn(64, 1)) for _ in range(steps)]
    pipe = replicated(copy.deepcopy(model), own_rows(batches[0].inputs), chunks=chunks)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(pipe.train_step(own_rows(batch.inputs), target=own_rows(batch.targets), loss_fn=loss_fn).item())
        optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plain = comparison.train(model, batches, loss_fn=loss_fn, optimizer=optimizer)
    trained = comparison.tensor_difference(comparison.parameters(model), dict(pipe.named_parameters()))
    return {
        f"losses over {steps} steps": comparison.loss_difference(plain, tuple(losses)),
        "trained parameters": trained,
    }


def run(*, steps: int, chunks: int, dtype: str) -> Outcome:
    """Run every comparison; each process has the differences of its own rows and parameters."""
    comparison.prepare()
    torch.set_default_dtype(getattr(torch, dtype))
    differences = compare_rows(Model(5, 2), torch.randn(30, 5))
    differences |= compare_training(Net(), steps=steps, chunks=chunks)
    outcome = Outcome({}, differences)
    if dist.get_rank() == 0:
        comparison.print_verdict(outcome)
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison in this process of ``torchrun``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the data-parallel training")
    parser.add_argument("--chunks", type=int, default=2, help="microbatches per process and batch")
    comparison.add_dtype(parser)
    options = parser.parse_args(argv)
    dist.init_process_group()
    return run(**vars(options)).exit_code


if __name__ == "__main__":
    sys.exit(main())
