"""What replicas add up in a step: those of a pipeline, each of which had rows of its own, and those of a stage.

    gradients             of the replica's rows ── bucket by bucket, all_reduce ──► of all rows ─► .grad, hooks
    of sharded ones       one by one, reduce_scatter ──► this replica's shard of the sum ─► .grad of the shard
    running statistics    what norms saw in its rows ── gathered ──► what all saw, replica by replica ─► one update

No exchange depends on a replica's rows: one without any takes part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from autosplit.backward import donate_gradients
from autosplit.distributed.world import World
from autosplit.parallel import BUCKET_BYTES
from autosplit.runtime.norms import Part, Use
from autosplit.runtime.step.leaves import held_back

_SPARSE = -256
"""Stands for a sparse gradient where dense ones count 1: the sum is below zero where there is any."""


class Share(NamedTuple):
    """What a rank says of its replica's part of a batch: rows, microbatches, its number of the kind of call, a word."""

    rows: int
    microbatches: int
    kind: int
    word: Any


@contextmanager
def adding_gradients(world: World, leaves: Sequence[Tensor], takers: Sequence[Tensor]) -> Iterator[None]:
    """Take the gradients that come to leaves inside, add those of all replicas, and give the sums to ``takers``.

    These are the leaves themselves, or shards of them.
    """
    before = [leaf.grad for leaf in leaves]
    try:
        with held_back(leaves):
            for leaf in leaves:
                leaf.grad = None
            yield
            found = [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient
    own = {id(taker): (leaf, gradient) for leaf, taker, gradient in zip(leaves, takers, found, strict=True)}
    del found
    shards = [taker for taker in takers if isinstance(taker, DTensor)]
    for bucket in list(_buckets(taker for taker in takers if not isinstance(taker, DTensor))):
        _give(bucket, _added(world, bucket, [own.pop(id(leaf))[1] for leaf in bucket]))
    there = torch.tensor([own[id(shard)][1] is not None for shard in shards], dtype=torch.int32)
    if shards:
        world.add_up("which gradients other replicas have", there)
    for shard, count in zip(shards, there.tolist(), strict=True):
        leaf, gradient = own.pop(id(shard))
        if count:
            _give([shard], [_scattered(shard, torch.zeros_like(leaf) if gradient is None else gradient)])


def _give(leaves: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
    """Give leaves their gradients, those that have one; the list is empty then: who else holds one has it copied."""
    tensors = [leaf for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
    found = [gradient for gradient in gradients if gradient is not None]
    gradients.clear()
    if tensors:
        torch.autograd.backward(donate_gradients(tensors, found))


def _scattered(shard: DTensor, gradient: Tensor) -> Tensor:
    """Return this replica's shard of the sum over the replicas."""
    mesh = shard.device_mesh
    dense = (gradient.to_dense() if gradient.is_sparse else gradient).to(shard.dtype)
    return DTensor.from_local(dense, mesh, [Partial()] * mesh.ndim).redistribute(placements=shard.placements)


def _added(world: World, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums over the replicas; None where no replica has a gradient."""
    flat = _in_a_row(leaves, gradients)
    world.add_up("gradients of other replicas", flat)
    counts = flat[-len(leaves) :].real.tolist()
    sums = flat[: -len(leaves)].split([leaf.numel() for leaf in leaves])
    found = zip(leaves, gradients, sums, counts, strict=True)
    return [
        _sparse_sum(world.across, leaf, own) if count < 0 else _sum(leaf, own, total) if count else None
        for leaf, own, total, count in found
    ]


def _sparse_sum(group: Any, leaf: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the sum of sparse gradients over the ranks of a group, added in their order."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, None if gradient is None else gradient.cpu(), group=group)
    return reduce(torch.add, (one for one in every if one is not None)).to(leaf.device)


def _in_a_row(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the values of gradients, zeros for none and for sparse ones, and then for each what it is."""
    there = [0 if gradient is None else _SPARSE if gradient.is_sparse else 1 for gradient in gradients]
    dense = zip(leaves, gradients, there, strict=True)
    parts = [leaf.new_zeros(leaf.numel()) if has < 1 or g is None else g.reshape(-1) for leaf, g, has in dense]
    return torch.cat([*parts, leaves[0].new_tensor(there, requires_grad=False)])


def _sum(leaf: Tensor, own: Tensor | None, total: Tensor) -> Tensor:
    """Return a sum in the memory of the replica's own gradient, where there is one."""
    return (torch.empty_like(leaf) if own is None else own).copy_(total.view(leaf.shape))


def _buckets(leaves: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield leaves of one dtype, so many that their gradients fill a bucket; the same on all replicas."""
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for leaf in leaves:
        own = kinds[leaf.dtype]
        own.append(leaf)
        if sum(one.numel() * one.element_size() for one in own) >= BUCKET_BYTES:
            yield kinds.pop(leaf.dtype)
    yield from kinds.values()


def stage_group(world: World, ranks: Sequence[Sequence[int]]) -> Any:
    """Return the group of the replicas of this rank's stage, None where it has one; all ranks call it alike.

    ``ranks`` are those of each stage's replicas.
    """
    several = [tuple(own) for own in ranks if len(own) > 1]
    for own in several:
        if own not in world.stages:
            world.stages[own] = dist.new_group([world.members[rank] for rank in own])
    return next((world.stages[own] for own in several if world.rank in own), None)


def added_in_order(group: Any, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums over the ranks of a group, added in their order; None where none has a gradient.

    So they have the bits of one process, on every rank. Gradients are those of leaves of the same number.
    """
    given = {id(leaf): gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
    sums: dict[int, Tensor | None] = {}
    for bucket in _buckets(leaf for leaf in leaves if leaf.requires_grad):
        flat = _in_a_row(bucket, [given[id(leaf)] for leaf in bucket])
        every = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather([one.view(torch.uint8) for one in every], flat.view(torch.uint8), group=group)
        rows = [one.split([*(leaf.numel() for leaf in bucket), len(bucket)]) for one in every]
        there = [row[-1].real.tolist() for row in rows]
        for place, leaf in enumerate(bucket):
            if any(has[place] < 0 for has in there):
                sums[id(leaf)] = _sparse_sum(group, leaf, given[id(leaf)])
                continue
            total = None
            for row in (row for row, has in zip(rows, there, strict=True) if has[place]):
                total = row[place] if total is None else total + row[place]
            sums[id(leaf)] = None if total is None else _sum(leaf, None, total)
    return [sums.get(id(leaf)) for leaf in leaves]


def join_statistics(
    world: World,
    own: dict[str, Use],
    named: Iterable[tuple[str, Tensor]],
    ranks: Sequence[int],
    *,
    in_turn: bool = False,
) -> None:
    """Give the norms of every replica what all of them saw, in the order of the replicas.

    ``own``: what this one saw, by the name of the call; ``named``: the model's state; ``ranks`` of
    ``torch.distributed`` are the replicas. ``in_turn``: they had different microbatches of one batch.
    """
    tensors = dict(named)
    words = world.gather("joins statistics", packed(own, tensors))
    own.clear()
    join(own, [words[rank] for rank in ranks], tensors, in_turn=in_turn)


def packed(own: Mapping[str, Use], named: Mapping[str, Tensor]) -> dict[str, Use]:
    """Return what norms saw as another process can read it: with names for the tensors of the model."""
    names = {id(tensor): name for name, tensor in named.items()}
    return {name: _packed(use, names) for name, use in own.items()}


def join(
    own: dict[str, Use], words: Iterable[Mapping[str, Use]], tensors: Mapping[str, Tensor], *, in_turn: bool
) -> None:
    """Add to what norms saw, by the name of the call, what :func:`packed` said on replicas."""
    for word in words:
        for name, use in word.items():
            joined = own.setdefault(name, _unpacked(use, tensors))
            for microbatch, part in use.parts.items():
                moments = (moment.to(joined.running[0].device) for moment in (part.mean, part.variance))
                joined.parts[microbatch if in_turn else len(joined.parts)] = Part(part.values, *moments)


def _packed(use: Use, names: Mapping[int, str]) -> Use:
    """Return what a norm saw, with names for the tensors of the model."""
    running: Any = tuple(names[id(tensor)] for tensor in use.running)
    batches: Any = None if use.batches is None else names[id(use.batches)]
    cpu = partial(torch.Tensor.to, device="cpu", copy=True)
    parts = {m: Part(part.values, *map(cpu, part[1:])) for m, part in sorted(use.parts.items())}
    return replace(use, running=running, batches=batches, parts=parts, written=())


def _unpacked(use: Any, tensors: Mapping[str, Tensor]) -> Use:
    """Return the same with this model's tensors, and nothing seen yet."""
    mean, variance = (tensors[name] for name in use.running)
    return replace(use, running=(mean, variance), batches=use.batches and tensors[use.batches], parts={})
