"""What a rank has of every node, and what it waits for, by the tensor plan that pipes run.

```
    residual ─► norm ─► column product ─► heads, features ─► row product ─► sum ─► residual
    positions   positions    part              part             part      positions  positions
```

Between pairs of products ranks share positions where the plan has them so (Korthikanti et al. 2022, arXiv 2205.05198):
row products scatter their sums, and what column products take is gathered in both passes and kept in parts. Megatron-LM
computes any loss on parts of the words too (Shoeybi et al. 2019, arXiv 1909.08053), a pipe only that of the model's own
forward: a plan assumes it for the runtimes that do (`autosplit.runtimes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from autosplit.profile.shares import Collective, NodeShare, TensorShares
from autosplit.tensor.axes import Shard
from autosplit.tensor.collectives import Placement
from autosplit.tensor.plan import NodeCollective, TensorPlan
from autosplit.tensor.ways import PARTIAL
from autosplit.trace.graph import TracedGraph


def shares_of(plan: TensorPlan, traced: TracedGraph, *, sequence: bool) -> TensorShares:
    """Return what a rank has under a tensor plan: as it runs, or with ``sequence`` parallelism as Megatron-LM's."""
    fraction, gives = 1 / plan.ranks, {node.name: node.gives[0] for node in plan.nodes.values() if node.gives}
    names = {id(parameter): name for name, parameter in traced.root.named_parameters()}
    first = {name: names[id(tensor)] for name, tensor in traced.root.named_parameters(remove_duplicate=False)}
    again = {plan.nodes[key].name for key in plan.gathered}
    sent = [*(_as_megatron(plan, gives, again) if sequence else plan.collectives)]
    moved = {(each.node, each.collective.kind) for each in sent if each.collective.phase == "forward"}
    pairs = ((key, name) for key, names in plan.gathered.items() for name in names if not sequence)
    gathered = {name: plan.nodes[key].name for key, name in pairs}
    nodes, positions = {}, set(_with_positions(traced, plan.ranks)) if sequence else set()
    for key, node in plan.nodes.items():
        kept = sequence or node.name in again or (node.name, "all_gather") not in moved
        held = isinstance(gives.get(node.name), Shard) and kept
        held |= bool(node.sums)  # what a loss keeps is its part of the softmax
        held |= (node.name, "reduce_scatter") in moved and (node.name, "all_reduce") not in moved
        whole = node.share == 1 and node.name in positions  # as the first layer's residual stream may be in the plan
        parts = fraction if whole else node.share, fraction if held or whole else 1.0
        inner = gives.get(node.name) is PARTIAL
        nodes[node.name] = NodeShare(*parts, whole=gathered.get(key, ""), inner=inner)
    for each in sent:
        # Sums are waited for behind what makes them, gathers in front of what takes them: beside products.
        at = each.node if gives.get(each.node) is PARTIAL or each.users[0] not in nodes else each.users[0]
        share, waits = nodes[at], (Collective(each.collective.kind, first.get(each.node, each.node)),)
        if each.collective.phase == "forward":
            nodes[at] = replace(share, forward=share.forward + waits)
        else:
            nodes[at] = replace(share, backward=share.backward + waits)
    states = {name: fraction for name, placed in plan.parameters.items() if isinstance(placed, Shard)}
    return TensorShares(nodes, states)


def _with_positions(traced: TracedGraph, ranks: int) -> Iterator[str]:
    """Yield the nodes whose result has rows, positions that ranks divide, and features."""
    for _, info in traced.compute_nodes():
        shape = info.tensors[0].shape if info.tensors else ()
        if len(shape) == 3 and shape[0].per_row and not shape[1].per_row and shape[1].constant % ranks == 0:
            yield info.name


def _as_megatron(plan: TensorPlan, gives: Mapping[str, Placement], again: Collection[str]) -> Iterator[NodeCollective]:
    """Yield the collectives where outputs stay parts for the loss, and what was gathered is so in the backward too.

    Gradients of norms, which see a rank's positions, are summed once per step (``finalize_model_grads``), not in every
    backward: a few bytes, which are left out. ``again``: the values that the plan gathers so.
    """
    for each in plan.collectives:
        summed = each.node in plan.parameters and each.collective.phase == "backward"
        if summed or (each.users == ("output",) and isinstance(gives.get(each.node), Shard)):
            continue
        yield each
        if (each.collective.kind, each.collective.phase) == ("reduce_scatter", "backward") and each.node not in again:
            yield replace(each, collective=replace(each.collective, kind="all_gather"))
