"""The batch where only the first stage's rank is called with it: what other ranks need is brought to them.

first stage's rank   the batch ─► its structure to all ─► tensors to the ranks whose stages take them
the others           tensors of the same shapes, filled where something here reads them
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from autosplit.distributed.messages import Described, blank_like, described, flattened
from autosplit.distributed.world import World, attempt
from autosplit.runtime.lower.program import ending_slots, slots_of
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.ops import OUT
from autosplit.runtime.step.step import Step
from autosplit.trace.graph import INFO
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


def takers_of(step: Step, ranks: Sequence[Sequence[int]], *, returned: bool = True) -> dict[int, set[int]]:
    """Return the ranks that read each tensor of the batch, by its position; ``ranks`` are those of the stages.

    ``returned``: the last stage's rank reads those that the model returns as they are.
    """
    lowered: Lowered = step.lowered
    takers: dict[str, set[int]] = defaultdict(set)
    for stage, members in enumerate(ranks):
        for slot in (*lowered.layout.stages[stage].inputs, *slots_of(lowered.layout, stage)):
            takers[slot.value].update(members)
    form, _ = attempt(lambda: step.once("own loss", lambda: form_of(lowered.traced)))
    late = [slot.value for slot in lowered.epilogue_inputs] + (
        [] if form is None else [node.name for node in form.fixed]
    )
    late += [value.name for value in lowered.outputs if isinstance(value, fx.Node)] if returned else []
    for name in late:
        takers[name].update(ranks[-1])
    names = [n.name for n in lowered.traced.graph.nodes if n.op == "placeholder" and INFO in n.meta]
    return {names.index(name): members for name, members in takers.items() if name in names}


def pairs_of(lowered: Lowered, ranks: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Return the ranks between which anything travels, as sender and receiver; gradients go the other way.

    ``ranks`` are those of each stage's replicas, which tell each other losses and gradients.
    """
    layout, last = lowered.layout, len(ranks) - 1
    routes = {(source, stage) for stage, region in enumerate(layout.stages) for source in region.received}
    routes |= {(stage, last) for stage, region in enumerate(layout.stages) if OUT in region.sent}
    slots = [(stage, slot) for stage in range(len(ranks)) for slot in slots_of(layout, stage)]
    slots += [(last, slot) for slot in ending_slots(lowered)]
    routes |= {(layout.home[slot.value], stage) for stage, slot in slots if slot.value in layout.home}
    pairs = {pair for source, target in routes for pair in product(ranks[source], ranks[target])}
    pairs |= {pair for members in ranks for pair in product(members, members)}
    return {pair for a, b in pairs for pair in ((a, b), (b, a)) if a != b}
