"""The batch where only the first stage's rank is called with it: what other ranks need is brought to them.

first stage's rank   the batch ─► its structure to all ─► tensors to the ranks whose stages take them
the others           tensors of the same shapes, filled where something here reads them
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from autosplit.distributed.messages import Described, blank_like, described, flattened
from autosplit.distributed.start import placeholders, slots_of
from autosplit.distributed.world import World, attempt
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.step.step import Step
from autosplit.trace.inputs.objects import one_tensor, take_apart
from autosplit.trace.reductions.own_loss import form_of


class _Blank(NamedTuple):
    """A tensor of the batch without its values."""

    like: Described
    on_cpu: bool


def _blank(leaf: Any) -> Any:
    """Return a tensor without its values, anything else as it is."""
    return _Blank(described(leaf), leaf.device.type == "cpu") if isinstance(leaf, torch.Tensor) else leaf


def like_first(world: World, doing: str, first: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the batch of the first stage's rank; on other ranks its tensors have no values yet."""

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, _Blank):
            return leaf
        return blank_like(leaf.like, torch.device("cpu") if leaf.on_cpu else world.device)

    leaves, structure = take_apart((args, kwargs))
    word = (list(map(_blank, leaves)), one_tensor(leaves), structure) if world.rank == first else None
    blank, same, structure = world.gather(doing, word)[world.members[first]]
    if world.rank == first:
        return args, kwargs
    leaves = [filled(leaf) for leaf in blank]
    return structure([leaves[index] for index in same])


def bring(world: World, first: int, tensors: Sequence[torch.Tensor], takers: dict[int, set[int]]) -> None:
    """Fill tensors of the batch by their position on the ranks that take them."""
    works: list[Any] = []
    for index, ranks in takers.items():
        tensor = tensors[index].detach()
        flat = flattened(tensor)
        group = world.control if tensor.device.type == "cpu" else world.payload
        for rank in sorted(ranks - {first}) if tensor.numel() else ():
            if world.rank == first:
                works.append(dist.isend(flat, group=group, group_dst=rank))
            elif world.rank == rank:
                works.append(dist.irecv(flat, group=group, group_src=first))
    with world.waiting("the batch", *(world.others() if world.rank == first else [first])):
        for work in works:
            work.wait()


def takers_of(step: Step, ranks: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Return the ranks that read each tensor of the batch, by its position; ``ranks`` are those of the stages."""
    lowered: Lowered = step.lowered
    takers: dict[str, set[int]] = defaultdict(set)
    for stage, members in enumerate(ranks):
        for slot in (*lowered.layout.stages[stage].inputs, *slots_of(lowered.layout, stage)):
            takers[slot.value].update(members)
    form, _ = attempt(lambda: step.once("own loss", lambda: form_of(lowered.traced)))
    late = [slot.value for slot in lowered.epilogue_inputs] + (
        [] if form is None else [node.name for node in form.fixed]
    )
    late += [value.name for value in lowered.outputs if isinstance(value, fx.Node)]
    for name in late:
        takers[name].update(ranks[-1])
    names = [node.name for node in placeholders(lowered.traced.graph)]
    return {names.index(name): members for name, members in takers.items() if name in names}
