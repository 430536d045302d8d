"""What a rank has of every node, and what it waits for, by the tensor plan that pipes run.

```
    residual ─► column product ─► heads, features ─► row product ─► sum ─► residual
     whole          part               part            part        whole     whole
```

With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) ranks share the positions of what the plan leaves
whole: sums become scatters, column products gather, and the loss is computed on parts of the words (Shoeybi et al.
2019, arXiv 1909.08053). No pipe runs so: a plan assumes it where it is asked to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from autosplit.profile.shares import Collective, NodeShare, TensorShares
from autosplit.tensor.axes import Shard
from autosplit.tensor.moves import collectives
from autosplit.tensor.plan import NodeCollective, TensorPlan
from autosplit.tensor.ways import COPIED, PARTIAL, REPLICATED
from autosplit.trace.graph import INFO, TracedGraph

_Waits = tuple[Collective, ...]


def shares_of(plan: TensorPlan, traced: TracedGraph, *, sequence: bool) -> TensorShares:
    """Return what a rank has under a tensor plan: as it runs, or with ``sequence`` parallelism."""
    part, gives = 1 / plan.ranks, {own.name: own.gives[0] for own in plan.nodes.values() if own.gives}
    names = {id(parameter): name for name, parameter in traced.root.named_parameters()}
    first = {name: names[id(own)] for name, own in traced.root.named_parameters(remove_duplicate=False)}
    moved = {one.node for one in plan.collectives if one.collective.phase == "forward"}
    whole = {n for n, own in gives.items() if own is REPLICATED or own is COPIED}
    shared = _shared(whole | moved, plan, traced) if sequence else ()
    nodes = {}
    for own in plan.nodes.values():
        alone = own.name in shared or (isinstance(gives.get(own.name), Shard) and own.name not in moved)
        work = part if own.name in whole and own.name in shared else own.share
        nodes[own.name] = NodeShare(work, part if alone else 1.0)
    for one in (*plan.collectives, *_gathers(shared, plan)):
        placed = gives.get(one.node, REPLICATED)
        at = one.node if placed is PARTIAL or isinstance(placed, Shard) else one.users[0]
        one = replace(one, node=first.get(one.node, one.node))
        forward, backward = _waits(one, shared, of_words=isinstance(placed, Shard) and one.users == ("output",))
        share = nodes[at]
        nodes[at] = replace(share, forward=share.forward + forward, backward=share.backward + backward)
    states = {name: part for name, placed in plan.parameters.items() if isinstance(placed, Shard)}
    return TensorShares(nodes, states)


def _shared(names: Collection[str], plan: TensorPlan, traced: TracedGraph) -> Collection[str]:
    """Return the nodes of which ranks share positions: rows of so many that they divide, with features.

    What takes such a value shares positions too, or is a product whose ranks gather them.
    """
    found = set()
    by_name = traced.by_name()
    for name in names:
        shape = by_name[name].meta[INFO].tensors[0].shape
        if len(shape) == 3 and shape[0].per_row and not shape[1].per_row and shape[1].constant % plan.ranks == 0:
            found.add(name)
    wants = [(key, own) for own in plan.nodes.values() for key, placed in own.wants.items() if REPLICATED in placed]
    taken = [(plan.nodes[key].name, own.name) for key, own in wants if key in plan.nodes]
    while whole := {name for name, taker in taken if name in found and taker not in found}:
        found -= whole
    return found


def _gathers(shared: Collection[str], plan: TensorPlan) -> Iterator[NodeCollective]:
    """Yield the sums of gradients that move behind a node that ranks no longer copy, to the products that take it."""
    takers: dict[str, list[str]] = {}
    for own in plan.nodes.values():
        for key, placed in own.wants.items():
            if COPIED in placed and own.name not in shared:
                takers.setdefault(key, []).append(own.name)
    for key, found in takers.items():
        node = plan.nodes.get(key)
        if node and node.name in shared and COPIED in node.gives:
            size, ranks = node.value_bytes, plan.ranks
            for one in collectives(REPLICATED, COPIED, value_bytes=size, ranks=ranks, gradient=node.gradient):
                yield NodeCollective(node.name, tuple(found), one)


def _waits(one: NodeCollective, shared: Collection[str], *, of_words: bool) -> tuple[_Waits, _Waits]:
    """Return what a collective of the plan is in both passes; ``of_words``: it puts logits together."""
    kind, value, phase = one.collective.kind, one.node, one.collective.phase
    if value in shared and all(taker in shared for taker in one.users) and kind != "all_reduce":
        return (), ()  # from features to positions: far fewer bytes than the whole
    if value in shared and kind == "all_reduce":
        gather, scatter = Collective("all_gather", value), Collective("reduce_scatter", value)
        return ((scatter,), (gather,)) if phase == "forward" else ((gather,), (gather, scatter))
    if value in shared and of_words:
        return (), ()
    waits = (Collective(kind, value),)
    return (waits, ()) if phase == "forward" else ((), waits)
