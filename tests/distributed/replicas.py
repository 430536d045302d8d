"""The same training by the plain model on all rows, and by replicas of a pipeline on their parts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autosplit import autosplit
from autosplit.options import Sample
from autosplit.tensor.state import TensorPart
from tests.distributed.training import Training, named, without_gradients
from tests.equivalence.equality import Batch

Rows = Sequence[Sequence[int]]
"""By step, the rows of each replica."""


NAMES = {1: ("dp",), 2: ("dp", "pp"), 3: ("dp_replicate", "dp_shard", "pp")}
NAMES[4] = (*NAMES[3], "tp")
"""The dimensions of a mesh, by their number."""


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])


def replica_of(mesh: Any) -> int:
    """Return the number of this process's replica."""
    replica = 0
    for name in mesh.mesh_dim_names:
        if name.startswith("dp"):
            replica = replica * mesh[name].size() + mesh.get_local_rank(name)
    return replica


def whole(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state without shards; ranks that share tensors call it together."""
    parts = {name: value.part.whole(value) for name, value in state.items() if isinstance(value, TensorPart)}
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in {**state, **parts}.items()}


def part_of(value: Any, rows: Sequence[int], replica: int) -> Any:
    return value.split(list(rows))[replica] if isinstance(value, Tensor) else value


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def batches(training: Training, rows: Rows, dtype: torch.dtype) -> list[tuple[Batch, Any]]:
    """Return the inputs and the target of each step, all rows of them."""
    found = []
    for step, own in enumerate(rows):
        batch = without_gradients(training.batch(sum(own)))
        change = doubled if dtype == torch.float64 else lambda value: value
        batch = Batch(tuple(map(change, batch.args)), {key: change(value) for key, value in batch.kwargs.items()})
        found.append((batch, change(training.target(batch, step))))
    return found


def train_plain(training: Training, rows: Rows, dtype: torch.dtype, every: int, make: Callable[..., Any]) -> Any:
    """Train the plain model on all rows; return the losses, its state and the random state."""
    model = training.make().to(dtype)
    optimizer = make(model.parameters())
    torch.manual_seed(5)
    losses = []
    for step, (batch, target) in enumerate(batches(training, rows, dtype)):
        output = model(*batch.args, **batch.kwargs)
        loss = training.loss(output, target) if training.loss is not None else output["loss"]
        loss.backward()
        losses.append(loss.detach())
        if (step + 1) % every == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict(), torch.get_rng_state()


def train_replicas(
    training: Training,
    mesh: Any,
    rows: Rows,
    dtype: torch.dtype,
    every: int,
    make: Callable[..., Any],
    options: Mapping[str, Any],
    reduction: str,
) -> Any:
    """Train over a mesh, each replica on its rows; return the losses, this rank's state, and the random state."""
    replica = replica_of(mesh)
    given = batches(training, rows, dtype)
    first = given[0][0]
    largest = next(r for r, own in enumerate(rows[0]) if own == max(rows[0]))
    sample = Sample(
        *(part_of(v, rows[0], largest) for v in first.args),
        **{k: part_of(v, rows[0], largest) for k, v in first.kwargs.items()},
    )
    pipe = autosplit(training.make().to(dtype), mesh=mesh, chunks=training.chunks, sample=sample, **options)
    parameters = list(pipe.parameters())
    optimizer = make(parameters) if parameters else None
    torch.manual_seed(5)
    losses = []
    for step, (batch, target) in enumerate(given):
        args = [part_of(value, rows[step], replica) for value in batch.args]
        kwargs = {key: part_of(value, rows[step], replica) for key, value in batch.kwargs.items()}
        how = {}
        if training.loss is not None:
            how = {"target": part_of(target, rows[step], replica), "loss_fn": training.loss}
            how["loss_reduction"] = reduction
        losses.append(pipe.train_step(*args, **kwargs, **how))
        if (step + 1) % every == 0:
            pipe.clip_grad_norm_(0.5)
            if optimizer is not None:
                optimizer.step()
            pipe.zero_grad()
    return losses, whole(pipe.state_dict()), torch.get_rng_state()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def compare(
    which: Training | str,
    shape: tuple[int, ...],
    rows: Rows,
    *,
    dtype: torch.dtype = torch.float64,
    every: int = 1,
    make: Callable[..., Any] = momentum,
    reduction: str = "auto",
    **options: Any,
) -> list[str]:
    """Train both ways and return what differs: relative to the largest value by more than a few roundings."""
    mesh, training = mesh_of(*shape), named(which)
    own = train_replicas(training, mesh, rows, dtype, every, make, options, reduction)
    every_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, own)
    losses, state, random = train_plain(training, rows, dtype, every, make)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    found = []
    for rank, (others, part, rng) in enumerate(every_rank):
        found += [
            f"rank {rank}, loss {n}: {a} for {b}"
            for n, (a, b) in enumerate(zip(others, losses, strict=True))
            if _off(a, b) > tolerance
        ]
        found += [
            f"rank {rank}, {n}: off by {_off(v, state[n]):.2g}"
            for n, v in part.items()
            if _off(v, state[n]) > tolerance
        ]
        if options.get("rng") != "counter" and not torch.equal(rng, random):
            found.append(f"rank {rank}: the random state is another one")
    replicas = mesh.mesh.reshape(len(rows[0]), -1)
    tp = mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1
    for members in replicas.unflatten(1, (-1, tp)).transpose(0, 1).flatten(1).tolist():
        first = every_rank[members[0]][1]
        found += [
            f"{name}: ranks {members[0]} and {rank} have other bits"
            for rank in members[1:]
            for name, value in every_rank[rank][1].items()
            if not torch.equal(value, first[name])
        ]
    names = {name for members in replicas.tolist()[:1] for rank in members for name in every_rank[rank][1]}
    return found + [f"nobody has {name}" for name in state if name not in names]


def _off(one: Tensor, other: Tensor) -> float:
    if not one.is_floating_point() or not one.numel():
        return float(not torch.equal(one, other))
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
