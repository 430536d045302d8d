"""What replicas of a pipeline add up in a step, each of which had rows of its own.

    gradients             of the replica's rows ── bucket by bucket, all_reduce ──► of all rows ─► .grad, hooks
    of sharded ones       one by one, reduce_scatter ──► this replica's shard of the sum ─► .grad of the shard
    running statistics    what norms saw in its rows ── gathered ──► what all saw, replica by replica ─► one update

No exchange depends on a replica's rows: one without any takes part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from autosplit.backward import donate_gradients
from autosplit.distributed.world import World
from autosplit.parallel import BUCKET_BYTES
from autosplit.runtime.norms import Part, Use
from autosplit.runtime.step.cells import held_back


class Share(NamedTuple):
    """What a rank says of its replica's part of a batch: rows, microbatches, and what else it has to say."""

    rows: int
    microbatches: int
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
    parts = [leaf.new_zeros(leaf.numel()) if g is None else _flat(g) for leaf, g in zip(leaves, gradients, strict=True)]
    there = torch.tensor([gradient is not None for gradient in gradients], device=leaves[0].device)
    flat = torch.cat([*parts, there.to(leaves[0].dtype)])
    world.add_up("gradients of other replicas", flat)
    counts = flat[-len(leaves) :].tolist()
    sums = flat[: -len(leaves)].split([leaf.numel() for leaf in leaves])
    found = zip(leaves, gradients, sums, counts, strict=True)
    return [_sum(leaf, own, total) if count else None for leaf, own, total, count in found]


def _sum(leaf: Tensor, own: Tensor | None, total: Tensor) -> Tensor:
    """Return a sum in the memory of the replica's own gradient, where there is one."""
    return (torch.empty_like(leaf) if own is None or own.is_sparse else own).copy_(total.view(leaf.shape))


def _flat(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)


def _buckets(leaves: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield leaves of one dtype, so many that their gradients fill a bucket; the same on all replicas."""
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for leaf in leaves:
        own = kinds[leaf.dtype]
        own.append(leaf)
        if sum(one.numel() * one.element_size() for one in own) >= BUCKET_BYTES:
            yield kinds.pop(leaf.dtype)
    yield from kinds.values()


def join_statistics(world: World, own: dict[str, Use], named: Iterable[tuple[str, Tensor]]) -> None:
    """Give the norms of every replica what all of them saw, in the order of the replicas.

    ``own``: what this one saw, by the name of the call; ``named``: the model's state.
    """
    tensors = dict(named)
    names = {id(tensor): name for name, tensor in tensors.items()}
    words = world.gather("joins statistics", {name: _packed(use, names) for name, use in own.items()})
    own.clear()
    for members in world.layout:
        for name, use in words[members[world.rank]].items():
            joined = own.setdefault(name, _unpacked(use, tensors))
            for part in use.parts.values():
                moments = (moment.to(joined.running[0].device) for moment in (part.mean, part.variance))
                joined.parts[len(joined.parts)] = Part(part.count, *moments)


def _packed(use: Use, names: Mapping[int, str]) -> Use:
    """Return what a norm saw, with names for the tensors of the model."""
    running: Any = tuple(names[id(tensor)] for tensor in use.running)
    batches: Any = None if use.batches is None else names[id(use.batches)]
    parts = {m: Part(part.count, part.mean.cpu(), part.variance.cpu()) for m, part in sorted(use.parts.items())}
    return Use(running, use.momentum, batches, use.averaged, parts)


def _unpacked(use: Any, tensors: Mapping[str, Tensor]) -> Use:
    """Return the same with this model's tensors, and nothing seen yet."""
    mean, variance = (tensors[name] for name in use.running)
    return Use((mean, variance), use.momentum, use.batches and tensors[use.batches], use.averaged)
