"""What ranks that share tokens wait for: keys and values of all tokens of a row, and tokens on their way to experts.

```
    cp   q k v of a rank's tokens ─► all k, v gathered ─► attention, a part of the keys at a time ─► its own tokens
    ep   tokens, twice sorted ─► all-to-all ─► products of the rank's experts ─► all-to-all ─► its own tokens
```

A rank of cp runs the model on its part of each row: that is recorded, and attention is done once for each part of the
keys, as torchtitan does by default (``context_parallel_rotate_method = "allgather"``): keys and values are gathered
beside the first part, in both passes, and their gradients are scattered. A ring (Liu et al. 2023, arXiv 2310.01889;
Megatron-LM's default) sends as many bytes. Rows are cut so that causal attention is as much on all ranks.

Experts are parameters of three dimensions that a product takes (Lepikhin et al. 2020, arXiv 2006.16668). Tokens are
taken to be spread evenly over them: a rank does as much work as alone, for fewer experts of more tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autosplit.errors import InputError
from autosplit.profile.node_costs.ledger import Operation
from autosplit.profile.node_costs.work import kind_of
from autosplit.profile.shares import Collective, NodeShare, TensorShares
from autosplit.profile.types import Profile
from autosplit.trace.graph import INFO, NodeClass, TracedGraph


def tokens_of(tokens: int | None, ranks: int) -> int:
    """Return the tokens of a row that a rank has; InputError where it cannot have an early and a late part of it."""
    if tokens is None or tokens % (2 * ranks):
        has = "no input is a table of integers" if tokens is None else f"{tokens} tokens are no {2 * ranks} equal parts"
        raise InputError(f"cp={ranks} ranks take an early and a late part of each row, and {has}; give another length")
    return tokens // ranks


def with_all_keys(costs: Profile, ranks: int) -> Profile:
    """Return the costs of a rank's tokens where attention takes the keys of all ranks, one part after the other."""

    def repeated(operations: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple(each for each in operations for _ in range(ranks if _attends(each) else 1))

    nodes = dict(costs.nodes)
    for name, node in costs.nodes.items():
        if any(map(_attends, node.forward_operations)):
            forward, backward = map(repeated, (node.forward_operations, node.backward_operations))
            nodes[name] = replace(node, forward_operations=forward, backward_operations=backward)
    return replace(costs, nodes=nodes)


def _attends(operation: Operation) -> bool:
    return "_scaled_dot" in operation.name


def shares_of_keys(shares: TensorShares, costs: Profile, traced: TracedGraph, ranks: int) -> TensorShares:
    """Return the shares of a rank of cp: attention waits for the keys and values of all.

    Raises InputError for a model without ``scaled_dot_product_attention``, whose scores are in no one's parts.
    """
    nodes = dict(shares.nodes)
    for node, info in traced.compute_nodes():
        if not any(map(_attends, costs.nodes[info.name].forward_operations)):
            continue
        taken = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, fx.Node)]
        names = [each.meta[INFO].name for each in (*taken, taken[0], taken[0])[1:3]]  # a layer makes them of its input
        gathers = tuple(Collective("all_gather", name, "cp", ranks * shares.of(name).held) for name in names)
        back = (*gathers, *(replace(each, kind="reduce_scatter") for each in gathers))
        nodes[info.name] = _waiting(shares.of(info.name), gathers, back)
    if nodes == shares.nodes:
        raise InputError(
            f"cp={ranks}: context parallel ranks share what torch's scaled_dot_product_attention takes, and the model "
            "does not call it; plan without cp, or with attention by it"
        )
    return replace(shares, nodes=nodes)


def shares_of_experts(shares: TensorShares, costs: Profile, traced: TracedGraph, ranks: int) -> TensorShares:
    """Return the shares of a rank of ep: its experts' parameters, and tokens sent to them and back.

    Raises InputError for a model without experts, or with a number of them that the ranks do not divide.
    """
    states = {name: s for name, s in costs.state.items() if s.is_parameter and len(s.shape) == 3}
    made: dict[fx.Node, set[str]] = {}
    products: dict[str, list[fx.Node]] = {}
    names = set[str]()
    for node, info in traced.compute_nodes():
        reads = states.keys() & {*info.reads, *(name for taken in node.all_input_nodes for name in made.get(taken, ()))}
        if reads and info.node_class is NodeClass.SHARED:
            made[node] = reads
        elif reads and any(_multiplies(each) for each in costs.nodes[info.name].forward_operations):
            products.setdefault(info.module, []).append(node)
            names |= reads
    counts = {states[name].shape[0] for name in names}
    if not counts or any(count % ranks for count in counts):
        have = f"has {', '.join(map(str, sorted(counts)))} of them" if counts else "no parameters of several experts"
        raise InputError(f"ep={ranks} ranks share experts, and the model {have}; give a degree that divides these")
    nodes = dict(shares.nodes)
    forms = {node.meta[INFO].name for node, reads in made.items() if reads & names}
    for name in forms:
        whole = shares.of(name)
        nodes[name] = replace(whole, work=whole.work / ranks, held=whole.held / ranks)
    for each in products.values():
        tokens = next(node for node in each[0].all_input_nodes if node not in made and INFO in node.meta)
        for node, value in ((each[0], tokens), (each[-1], each[-1])):
            name, sent = node.meta[INFO].name, value.meta[INFO].name
            moved = (Collective("all_to_all", sent, "ep", ranks * shares.of(sent).held),)
            nodes[name] = _waiting(nodes.get(name, shares.of(name)), moved, moved)
    own = {name: shares.states.get(name, 1.0) / ranks for name in names}
    return replace(shares, nodes=nodes, states={**shares.states, **own}, experts=dict.fromkeys((*names, *forms), ranks))


def _multiplies(operation: Operation) -> bool:
    return kind_of(operation.name, flops=operation.flops).startswith("matmul")


def _waiting(share: NodeShare, forward: tuple[Collective, ...], backward: tuple[Collective, ...]) -> NodeShare:
    return replace(share, forward=share.forward + forward, backward=share.backward + backward)
