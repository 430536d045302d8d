"""What replicas add up in a step: those of a pipeline, each of which had rows of its own, and those of a stage.

    gradients             of the replica's rows ── bucket by bucket, all_reduce ──► of all rows ─► .grad, hooks
    of sharded ones       one by one, reduce_scatter ──► this replica's shard of the sum ─► .grad of the shard
    running statistics    what norms saw in its rows ── gathered ──► what all saw, replica by replica ─► one update

No exchange depends on a replica's rows: one without any takes part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from autosplit.backward import donate_gradients, dtype_of_sums
from autosplit.distributed.groups import carries, new_group
from autosplit.distributed.world import World
from autosplit.parallel import BUCKET_BYTES
from autosplit.runtime.norms import Moments, Use
from autosplit.runtime.ops import plus
from autosplit.runtime.step.leaves import held_back
from autosplit.runtime.step.sums import Sums

_SPARSE = -256
"""Stands for a sparse gradient where dense ones count 1: the sum is below zero where there is any."""


class Share(NamedTuple):
    """What a rank says of its replica's part of a batch: rows, microbatches, its number of the kind of call, a word."""

    rows: int
    microbatches: int
    kind: int
    word: Any


@dataclass(frozen=True)
class _Begun:
    """A sum over the replicas of the gradients of some leaves that is under way: one after the other in one tensor."""

    leaves: Sequence[Tensor]
    flat: Tensor
    sparse: Mapping[int, Tensor]
    """This replica's sparse gradients, by the identity of the leaf."""
    all_dense: bool
    """Whether this replica has a dense gradient of each."""
    work: Any


class _Waiting:
    """Leaves whose gradients are added up together, when none is missing."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves, self.missing = leaves, len(leaves)


class Reductions:
    """Sums of gradients over the replicas. All replicas begin the same ones in the same order.

    Sums that are under way go on beside what the replica does until it asks for them. They are made in ``dtype`` where
    a leaf's is narrower.
    """

    def __init__(self, world: World, dtype: torch.dtype | None = None) -> None:
        self.world, self.dtype = world, dtype
        self._begun: list[_Begun] = []

    @contextmanager
    def beside(self, parameters: Sequence[Tensor], sums: Sums) -> Iterator[None]:
        """Begin to add up the gradients of a stage's parameters while its last backward makes them, bucket by bucket.

        Those of later layers come first. What is not complete until the end is begun there.
        """
        waiting = [_Waiting(bucket) for bucket in _buckets(reversed(parameters))]
        buckets = {id(leaf): bucket for bucket in waiting for leaf in sums.stand_ins_of(bucket.leaves)}

        def begin(*, all_of_them: bool) -> None:
            while waiting and (all_of_them or not waiting[0].missing):
                leaves = waiting.pop(0).leaves
                self.begin(leaves, sums.take_out(leaves))

        def comes(leaf: Tensor) -> None:
            buckets[id(leaf)].missing -= 1
            begin(all_of_them=False)

        leaves = sums.stand_ins_of(parameters) if sums.by_engine else ()
        handles = [leaf.register_post_accumulate_grad_hook(comes) for leaf in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        with sums.lane.active():
            begin(all_of_them=True)

    def begin(self, leaves: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
        """Begin to add up gradients of one dtype, None where this replica has none; the list is empty then.

        They lie in one bucket from then on.
        """
        flat = _in_a_row(leaves, gradients, self.dtype)
        sparse = {id(leaf): g for leaf, g in zip(leaves, gradients, strict=True) if g is not None and g.is_sparse}
        all_dense = not sparse and not any(g is None for g in gradients)
        gradients.clear()
        self._begun.append(_Begun(leaves, flat, sparse, all_dense, self.world.begin_to_add(flat)))

    def finish(self) -> dict[int, Tensor | None]:
        """Wait for all sums, and return them by the identity of the leaf; None where no replica has a gradient."""
        totals: dict[int, Tensor | None] = {}
        for begun in self._begun:
            self.world.wait_for("gradients of other replicas", begun.work)
            leaves, flat = begun.leaves, begun.flat
            counts = [1] * len(leaves) if begun.all_dense else flat[-len(leaves) :].real.tolist()
            sums = flat[: -len(leaves)].split([leaf.numel() for leaf in leaves])
            for leaf, total, count in zip(leaves, sums, counts, strict=True):
                if count < 0:
                    totals[id(leaf)] = _sparse_sum(self.world.across, leaf, begun.sparse.get(id(leaf)))
                else:
                    totals[id(leaf)] = _shaped(leaf, total) if count else None
        self._begun.clear()
        return totals

    def tensors(self) -> list[Tensor]:
        """Return what sums that are under way are made in."""
        return [begun.flat for begun in self._begun]


@contextmanager
def adding_gradients(
    reductions: Reductions,
    leaves: Sequence[Tensor],
    takers: Sequence[Tensor],
    scattered: Callable[[], Mapping[int, tuple[bool, DTensor]]],
    *,
    again: bool,
) -> Iterator[None]:
    """Take the gradients that come to leaves inside, add those of all replicas, and give the sums to ``takers``.

    These are the leaves themselves, or shards of them. Where sums of leaves were begun before, their replicas have no
    more for them inside, unless ``again``. ``scattered`` gives the sums of shards that were made before, by identity,
    and whether this replica had a gradient.
    """
    before = [(leaf.grad, leaf.grad_dtype) for leaf in leaves]
    try:
        with held_back(leaves):
            for leaf in leaves:
                leaf.grad = None
                if (dtype := dtype_of_sums(leaf, reductions.dtype)) != leaf.dtype:
                    leaf.grad_dtype = dtype
            yield
            grads = {id(taker): leaf.grad for leaf, taker in zip(leaves, takers, strict=True)}
    finally:
        for leaf, (gradient, dtype_before) in zip(leaves, before, strict=True):
            leaf.grad = None
            leaf.grad_dtype, leaf.grad = dtype_before, gradient
    early = reductions.finish()
    if not again and any(grads[id(taker)] is not None for taker in takers if id(taker) in early):
        raise RuntimeError("a parameter got a gradient behind its last action, when its sum had begun")
    shards = [taker for taker in takers if isinstance(taker, DTensor)]
    dense = [taker for taker in takers if not isinstance(taker, DTensor) and (again or id(taker) not in early)]
    for bucket in list(_buckets(dense)):
        reductions.begin(bucket, [grads.pop(id(taker)) for taker in bucket])
        late = reductions.finish()
        _give(bucket, [_both(early.pop(id(taker), None), late.pop(id(taker))) for taker in bucket])
    there = [taker for taker in takers if id(taker) in early]
    _give(there, [early.pop(id(taker)) for taker in there])
    wholes = {id(taker): leaf for leaf, taker in zip(leaves, takers, strict=True)}
    _scatter(reductions, shards, wholes, grads, scattered())


def _both(first: Tensor | None, other: Tensor | None) -> Tensor | None:
    if first is None or other is None:
        return other if first is None else first
    return plus(first, other)


def _scatter(
    reductions: Reductions,
    shards: Sequence[DTensor],
    leaves: Mapping[int, Tensor],
    grads: dict[int, Tensor | None],
    scattered: Mapping[int, tuple[bool, DTensor]],
) -> None:
    """Give shards theirs of the sums of gradients, by the identity of the shard, as of what they are shards of.

    ``scattered`` are sums of shards, and whether this replica had a gradient.
    """
    if not shards:
        return
    world = reductions.world
    device = torch.device("cpu") if world.across is None or carries(world.across, "cpu") else world.device
    had = {key: there for key, (there, _) in scattered.items()}
    has = [grads[id(shard)] is not None or had.get(id(shard), False) for shard in shards]
    there = torch.tensor(has, dtype=torch.int32, device=device)
    world.wait_for("which gradients other replicas have", world.begin_to_add(there))
    for shard, count in zip(shards, there.tolist(), strict=True):
        gradient = grads.pop(id(shard))
        if count and id(shard) in scattered:
            if gradient is not None:
                raise RuntimeError("a parameter got a gradient behind its last action, when its sum had begun")
            _give([shard], [scattered[id(shard)][1]])
        elif count:
            whole = torch.zeros_like(leaves[id(shard)]) if gradient is None else gradient
            _give([shard], [_scattered(shard, whole.to(dtype_of_sums(whole, reductions.dtype)))])


def _give(leaves: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
    """Give leaves their gradients, those that have one; the list is empty then: who else holds one has it copied."""
    tensors = [leaf for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
    present = [gradient for gradient in gradients if gradient is not None]
    gradients.clear()
    if tensors:
        torch.autograd.backward(donate_gradients(tensors, present))


def _scattered(shard: DTensor, gradient: Tensor) -> Tensor:
    """Return this replica's shard of the sum over the replicas."""
    mesh = shard.device_mesh
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    total = DTensor.from_local(dense, mesh, [Partial()] * mesh.ndim).redistribute(placements=shard.placements)
    return total.to(shard.dtype)


def _sparse_sum(group: Any, leaf: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the sum of sparse gradients over the ranks of a group, added in their order."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, None if gradient is None else gradient.cpu(), group=group)
    return reduce(torch.add, (g for g in every if g is not None)).to(leaf.device)


def _in_a_row(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], asked: torch.dtype | None) -> Tensor:
    """Return the values of gradients, zeros for none and for sparse ones, and then for each what it is.

    They are in the dtype of sums of which ``asked`` is the least.
    """
    dtype = dtype_of_sums(leaves[0], asked)
    there = [0 if gradient is None else _SPARSE if gradient.is_sparse else 1 for gradient in gradients]
    dense = zip(leaves, gradients, there, strict=True)
    parts = [leaf.new_zeros(leaf.numel()) if has < 1 or g is None else g.reshape(-1) for leaf, g, has in dense]
    return torch.cat([*(part.to(dtype) for part in parts), leaves[0].new_tensor(there, dtype=dtype)])


def _shaped(leaf: Tensor, total: Tensor) -> Tensor:
    """Return a sum as the gradient of a leaf: in the memory that it is in, where that has the leaf's order."""
    if leaf.is_contiguous():
        return total.view(leaf.shape).data  # no view to autograd: `grad.detach_()` works
    return torch.empty_like(leaf, dtype=total.dtype).copy_(total.view(leaf.shape))


def _buckets(leaves: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield leaves of one dtype, so many that their gradients fill a bucket; the same on all replicas."""
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for leaf in leaves:
        bucket = kinds[leaf.dtype]
        bucket.append(leaf)
        if sum(t.numel() * t.element_size() for t in bucket) >= BUCKET_BYTES:
            yield kinds.pop(leaf.dtype)
    yield from kinds.values()


def stage_group(world: World, ranks: Sequence[Sequence[int]]) -> Any:
    """Return the group of the replicas of this rank's stage, None where it has one; all ranks call it alike.

    ``ranks`` are those of each stage's replicas.
    """
    several = [tuple(members) for members in ranks if len(members) > 1]
    for members in several:
        if members not in world.stages:
            row = [world.members[rank] for rank in members]
            world.stages[members] = new_group(f"{world.label} one stage", [row], world.device.type, world.payload)
    return next((world.stages[members] for members in several if world.rank in members), None)


def added_in_order(
    group: Any, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], dtype: torch.dtype | None
) -> list[Tensor | None]:
    """Return the sums over the ranks of a group, added in their order; None where none has a gradient.

    So they have the bits of one process, on every rank. Gradients are those of leaves of the same number.
    """
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
    sums: dict[int, Tensor | None] = {}
    for bucket in _buckets(leaf for leaf in leaves if leaf.requires_grad):
        flat = _in_a_row(bucket, [by_leaf[id(leaf)] for leaf in bucket], dtype)
        every = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather([buffer.view(torch.uint8) for buffer in every], flat.view(torch.uint8), group=group)
        rows = [buffer.split([*(leaf.numel() for leaf in bucket), len(bucket)]) for buffer in every]
        there = [row[-1].real.tolist() for row in rows]
        for index, leaf in enumerate(bucket):
            if any(has[index] < 0 for has in there):
                sums[id(leaf)] = _sparse_sum(group, leaf, by_leaf[id(leaf)])
                continue
            total = None
            for row in (row for row, has in zip(rows, there, strict=True) if has[index]):
                total = row[index] if total is None else total + row[index]
            sums[id(leaf)] = None if total is None else _shaped(leaf, total)
    return [sums.get(id(leaf)) for leaf in leaves]


def join_statistics(
    world: World,
    uses: dict[str, Use],
    named: Iterable[tuple[str, Tensor]],
    ranks: Sequence[int],
    *,
    in_turn: bool = False,
) -> None:
    """Give the norms of every replica what all of them saw, in the order of the replicas.

    ``uses``: what this one saw, by the name of the call; ``named``: the model's state; ``ranks`` of
    ``torch.distributed`` are the replicas. ``in_turn``: they had different microbatches of one batch.
    """
    tensors = dict(named)
    words = world.gather("joins statistics", packed(uses, tensors))
    uses.clear()
    join(uses, [words[rank] for rank in ranks], tensors, in_turn=in_turn)


def packed(uses: Mapping[str, Use], named: Mapping[str, Tensor]) -> dict[str, Use]:
    """Return what norms saw as another process can read it: with names for the tensors of the model."""
    names = {id(tensor): name for name, tensor in named.items()}
    return {name: _packed(use, names) for name, use in uses.items()}


def join(
    uses: dict[str, Use], words: Iterable[Mapping[str, Use]], tensors: Mapping[str, Tensor], *, in_turn: bool
) -> None:
    """Add to what norms saw, by the name of the call, what :func:`packed` said on replicas."""
    for word in words:
        for name, use in word.items():
            joined = uses.setdefault(name, _unpacked(use, tensors))
            for microbatch, seen in use.parts.items():
                moments = (moment.to(joined.running[0].device) for moment in (seen.mean, seen.variance))
                joined.parts[microbatch if in_turn else len(joined.parts)] = Moments(seen.values, *moments)


def _packed(use: Use, names: Mapping[int, str]) -> Use:
    """Return what a norm saw, with names for the tensors of the model."""
    running: Any = tuple(names[id(tensor)] for tensor in use.running)
    batches: Any = None if use.batches is None else names[id(use.batches)]
    cpu = partial(torch.Tensor.to, device="cpu", copy=True)
    parts = {m: Moments(seen.values, *map(cpu, seen[1:])) for m, seen in sorted(use.parts.items())}
    return replace(use, running=running, batches=batches, parts=parts, written=())


def _unpacked(use: Any, tensors: Mapping[str, Tensor]) -> Use:
    """Return the same with this model's tensors, and nothing seen yet."""
    mean, variance = (tensors[name] for name in use.running)
    return replace(use, running=(mean, variance), batches=use.batches and tensors[use.batches], parts={})
