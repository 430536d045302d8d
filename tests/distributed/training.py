"""The same training in one process and in several, and where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.options import Sample
from tests.equivalence.equality import Batch, flatten


@dataclass(frozen=True)
class Training:
    """A model, its batches by step, and the loss; everything can be sent to another process by its names."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor] | None
    target: Callable[[Batch, int], Any] = lambda batch, step: None
    rows: tuple[int, ...] = (9, 9, 7, 9)
    chunks: int = 4
    seed: int | None = 5


def squares(output: Any, _: Any = None) -> Tensor:
    """Return a mean over rows of what a model returns: every floating tensor in it counts."""
    parts = [value for _, value in flatten(output) if isinstance(value, Tensor) and value.is_floating_point()]
    return sum((part.square().mean() for part in parts), torch.zeros((), dtype=parts[0].dtype))


def without_gradients(batch: Batch) -> Batch:
    def plain(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return Batch(tuple(plain(v) for v in batch.args), {k: plain(v) for k, v in batch.kwargs.items()})


def run(pipe: Any, training: Training) -> tuple[list[Tensor], list[Any]]:
    """Train a pipe; return the losses, and the outputs in eval mode."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9) if list(pipe.parameters()) else None
    if training.seed is not None:
        torch.manual_seed(training.seed)
    losses = []
    for step, rows in enumerate(training.rows):
        batch = without_gradients(training.batch(rows))
        pipe.zero_grad()
        target = training.target(batch, step)
        given = {} if training.loss is None else {"target": target, "loss_fn": training.loss}
        losses.append(pipe.train_step(*batch.args, **batch.kwargs, **given))
        if optimizer is not None:
            optimizer.step()
    batch = without_gradients(training.batch(training.rows[0]))
    return losses, [pipe.eval_step(*batch.args, **batch.kwargs)]


Trained = tuple[list[Tensor], list[Any]]
"""Losses, and outputs in eval mode."""


def named(training: Training | str) -> Training:
    """Return a training, or that of a name, by which other processes are told of it."""
    from tests.distributed.models import TRAININGS

    return TRAININGS[training] if isinstance(training, str) else training


def compare(
    which: Training | str, options: Mapping[str, Any], by: Callable[[Any, Training], Trained] = run
) -> list[str]:
    """Train over all ranks and, on rank 0, in one process by the same plan; return what differs there."""
    training, world, rank = named(which), dist.get_world_size(), dist.get_rank()
    batch = without_gradients(training.batch(max(training.rows)))
    sample = Sample(*batch.args, **batch.kwargs)
    pipe = autosplit(
        training.make(), devices="torchrun", chunks=training.chunks, sample=sample, outputs="all", **options
    )
    losses, outputs = by(pipe, training)
    states: list[Any] = [None] * world
    dist.all_gather_object(states, (pipe.state_dict(), torch.get_rng_state(), losses))
    if rank:
        return []
    options = {name: value for name, value in options.items() if name != "replicas"}  # the plan has them
    one = autosplit(training.make(), devices=["cpu"] * world, plan=pipe.plan, **options)
    expected, expected_outputs = by(one, training)
    found = [
        f"step {n}: {a.item()!r} for {b.item()!r}"
        for n, (a, b) in enumerate(zip(losses, expected, strict=True))
        if not _same(a, b)
    ]
    if any(not all(map(_same, own, losses)) for _, _, own in states):
        found.append("losses differ between ranks")
    if any(not torch.equal(own, torch.get_rng_state()) for _, own, _ in states):
        found.append("the random state is another one")
    whole = {name: value for own, _, _ in states for name, value in own.items()}
    assert pipe.plan is not None
    copies = [sum(name in own for own, _, _ in states) for name in whole]
    if set(copies) != {stage.replicas for stage in pipe.plan.stages if stage.parameters} or (
        whole.keys() != one.state_dict().keys()
    ):
        found.append(f"state: {sorted(whole)} for {sorted(one.state_dict())}")
    found += [f"replicas: {name}" for own, _, _ in states for name in own if not _same(own[name], whole[name])]
    found += [name for name, value in one.state_dict().items() if name in whole and not _same(whole[name], value)]
    pairs = zip(flatten(outputs), flatten(expected_outputs), strict=True)
    found += [f"output {a[0]}" for a, b in pairs if isinstance(a[1], Tensor) and not _same(a[1], b[1])]
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(((one == other) | (one != one)).all())
