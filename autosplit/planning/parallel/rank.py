"""A recording's costs as one rank has them: its part of every node, and the collectives that it waits for.

    profile of a microbatch ─ tensor shares, precision ─► its part ─ sharded parameters ─► profile of a rank

All that is planned from there on, times and bytes, is the rank's; nothing else knows of the group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from autosplit.parallel import Placed
from autosplit.profile.node_costs.ledger import Operation
from autosplit.profile.node_costs.work import kind_of, work_of
from autosplit.profile.shares import Collective, TensorShares
from autosplit.profile.types import NodeProfile, Profile, StateProfile
from cost_models.collectives import Group, longer_s
from cost_models.work import CostModel

_FP8 = torch.float8_e4m3fn
_Ran = tuple[tuple[Operation, ...], float]


def rank_profile(
    costs: Profile,
    shares: TensorShares,
    *,
    groups: Mapping[str, Group],
    blocks: Mapping[str, int],
    model: CostModel,
    fp8: bool = False,
    like: tuple[Profile, Profile] | None = None,
) -> Profile:
    """Return one rank's part of a profile, with modelled times.

    ``groups`` are the ranks that wait for each other, by the names of dimensions. ``blocks`` are the numbers of the
    repeated blocks that nodes lie in. ``fp8``: products of these with a parameter run in that. ``like``: another
    profile, at the same rows, and the rank's part of it: nodes of both have one part.
    """
    if fp8:
        shares = _kept_in_fp8(costs, shares, blocks)
    ranked = _Rank(costs, shares, groups, model, blocks if fp8 else {})
    before, done = ({}, {}) if like is None else (like[0].nodes, like[1].nodes)
    nodes = {name: done[name] if before.get(name) is node else ranked.node(node) for name, node in costs.nodes.items()}
    state = {name: _state(entry, shares) for name, entry in costs.state.items()}
    inputs = {name: round(count * shares.of(name).held) for name, count in costs.input_bytes.items()}
    return replace(costs, nodes=nodes, state=state, input_bytes=inputs, shares=shares)


def _kept_in_fp8(costs: Profile, shares: TensorShares, blocks: Mapping[str, int]) -> TensorShares:
    """Return the shares where values that only products in fp8 save are kept in half the bytes: in fp8."""
    products = {name for name in _products(costs) & blocks.keys() if costs.nodes[name].forward_flops}
    savers: dict[int, set[str]] = {}
    for name, node in costs.nodes.items():
        for storage in node.saved:
            savers.setdefault(storage, set()).add(name)
    nodes = dict(shares.nodes)
    for name, node in costs.nodes.items():
        saved = [savers[storage] for storage in node.outputs if storage in savers]
        if saved and all(each <= products for each in saved) and costs.nodes[name].forward_operations:
            nodes[name] = replace(shares.of(name), held=shares.of(name).held / 2)
    return replace(shares, nodes=nodes)


def _products(costs: Profile) -> set[str]:
    """Return the nodes that read a parameter; which of their operations are products, `_in_fp8` tells."""
    return {name for state in costs.state.values() if state.is_parameter for name in state.uses}


def _state(state: StateProfile, shares: TensorShares) -> StateProfile:
    share, experts = shares.states.get(state.name, 1.0), shares.experts.get(state.name, 1)
    return replace(state, elements=round(state.elements * share), bytes=round(state.bytes * share), experts=experts)


class _Rank:
    def __init__(
        self,
        costs: Profile,
        shares: TensorShares,
        groups: Mapping[str, Group],
        model: CostModel,
        fp8: Mapping[str, int],
    ) -> None:
        self.costs, self.shares, self.groups, self.model = costs, shares, groups, model
        self.fp8 = _products(costs) & fp8.keys()
        self.held: dict[int, float] = {}
        for name, node in costs.nodes.items():
            for storage in node.outputs:
                self.held.setdefault(storage, shares.of(name).held)
        self._known: dict[tuple[int, float, int, bool], _Ran] = {}

    def node(self, node: NodeProfile) -> NodeProfile:
        """Return a rank's part of a node; of a loss that it computes too, as much as the rank has of the result."""
        share, eighth, before = self.shares.of(node.name), node.name in self.fp8, self.costs.before_loss
        bare = before if before is not None and before.name == node.name else node
        side = _shared_side(bare.forward_operations, inner=share.inner)
        forward, forward_s = self._ran(bare.forward_operations, share.work, side, fp8=eighth)
        backward, backward_s = self._ran(bare.backward_operations, share.work, side, fp8=eighth)
        loss, loss_s = self._made(node.forward_operations[len(bare.forward_operations) :], share.held)
        back, back_s = self._made(node.backward_operations[len(bare.backward_operations) :], share.held)
        by_storage, later = dict.fromkeys(node.saved, share.held), share.work if bare is node else share.held
        whole = self.shares.gathered(node.name, self.costs.bytes_of)
        saved = {storage: round(size * {**by_storage, **self.held}[storage]) for storage, size in node.saved.items()}
        return replace(
            node,
            forward_operations=forward + loss,
            backward_operations=backward + back,
            forward_s=forward_s + loss_s + self.waits_s(share.forward, forward_s),
            backward_s=backward_s + back_s + self.waits_s(share.backward, backward_s),
            output_bytes=round(node.output_bytes * share.held),
            saved=saved,
            outputs={storage: round(size * self.held[storage]) for storage, size in node.outputs.items()},
            forward_transient_bytes=round(node.forward_transient_bytes * share.work) + whole,
            backward_transient_bytes=round(node.backward_transient_bytes * later) + whole,
        )

    def waits_s(self, collectives: Iterable[Collective], work_s: float) -> float:
        """Return how much longer some work takes for its collectives: keys travel beside one part of attention."""
        alone_s = beside_s = 0.0
        for each in collectives:
            taken_s = self.groups[each.over].seconds(each.kind, each.times * self.costs.bytes_of(each.value))
            alone_s, beside_s = (alone_s, beside_s + taken_s) if each.over == "cp" else (alone_s + taken_s, beside_s)
        return alone_s + (longer_s(beside_s, work_s / self.groups["cp"].size) if beside_s else 0.0)

    def _ran(self, operations: tuple[Operation, ...], share: float, side: int, *, fp8: bool) -> _Ran:
        """Return a rank's part of some operations, and how long they take; nodes of repeated blocks share lists."""
        key = id(operations), share, side, fp8
        if key not in self._known:
            self._known[key] = self._made(operations, share, side, fp8=fp8)
        return self._known[key]

    def _made(self, operations: tuple[Operation, ...], share: float, side: int = 0, *, fp8: bool = False) -> _Ran:
        scaled = [_part(operation, share, side) for operation in operations]
        scaled = [each for operation in scaled for each in (_in_fp8(operation) if fp8 else (operation,))]
        return tuple(scaled), sum(self.model.seconds(work_of(each)) for each in scaled)


def _shared_side(operations: Sequence[Operation], *, inner: bool) -> int:
    """Return the length of the side that ranks share of a forward's product: its columns, or what it sums over."""
    return next((op.sides[2 + inner] for op in operations if op.sides is not None and op.sides[0] == 1), 0)


def _part(operation: Operation, share: float, side: int) -> Operation:
    """Return a rank's part of an operation: of many products or heads some, of one a part of its shared side."""
    sides = operation.sides
    if sides is not None and share < 1:
        lengths = list(sides)
        at = 0 if sides[0] > 1 else lengths.index(side if side in sides[1:] else max(lengths))
        lengths[at] = max(1, round(lengths[at] * share))
        sides = (lengths[0], lengths[1], lengths[2], lengths[3])
    return replace(operation, flops=round(operation.flops * share), bytes=round(operation.bytes * share), sides=sides)


def _in_fp8(operation: Operation) -> Sequence[Operation]:
    """Return a product in fp8, and the casts of what it reads: about its bytes once more, read and written."""
    if kind_of(operation.name, flops=operation.flops) != "matmul" or operation.dtype.itemsize != 2:
        return (operation,)
    return replace(operation, dtype=_FP8), Operation("_to_copy", 0, operation.bytes, operation.dtype)


def with_gathers(
    costs: Profile, *, placed: Placed, blocks: Mapping[str, int], served: Mapping[str, int] | None = None
) -> Profile:
    """Return a rank's profile with the waits for what data-parallel ranks shard of each block's parameters.

    Under ZeRO-3 a block's parameters are gathered in both passes, those of the next block already beside it; from
    ZeRO-2 on its gradients are scattered in every backward. What the block's own work does not hide is waited for, and
    the work itself takes longer beside them. Nothing hides the gather of the first block and of what lies in front of
    it, nor the scatter of their gradients. What lies behind the blocks is kept for its backward.

    ``served``: the blocks that nodes which run once per step serve.
    """
    nodes, parallel = costs.nodes, placed.parallel
    if not parallel.scatters:
        return costs
    members: dict[int | str, list[NodeProfile]] = {}
    for name, node in nodes.items():
        members.setdefault(blocks.get(name, name), []).append(node)
    first = next((place for place, unit in enumerate(members) if not isinstance(unit, str)), len(members))
    places = {unit: place for place, unit in enumerate(members)}
    held, summed = Counter[int | str](), Counter[int | str]()
    gathers_s, scatters_s = defaultdict[int | str, float](float), defaultdict[int | str, float](float)
    for (unit, experts), entries in _by_unit(costs, {**(served or {}), **blocks}).items():
        group = placed.summing(experts)
        count, sums = sum(entry.bytes for entry in entries), sum(map(parallel.sum_of, entries))
        held[unit] += count
        summed[unit] += sums
        gathers_s[unit] += group.seconds("all_gather", count) if parallel.zero == 3 else 0.0
        scatters_s[unit] += group.seconds("reduce_scatter", sums)
    changed = {}
    for unit, count in held.items():
        gather_s, scatter_s = gathers_s[unit], scatters_s[unit]
        is_block, begins = not isinstance(unit, str), places[unit] <= first
        work_s = [sum(getattr(node, name) for node in members[unit]) for name in ("forward_s", "backward_s")]
        beside_s = gather_s * is_block + scatter_s * (not begins)
        node, whole = members[unit][0], 2 * count if parallel.zero == 3 and is_block else 0
        changed[node.name] = replace(
            node,
            forward_s=node.forward_s + (gather_s if begins else longer_s(gather_s, work_s[0])),
            backward_s=node.backward_s + longer_s(beside_s, work_s[1]) + scatter_s * begins,
            forward_transient_bytes=node.forward_transient_bytes + whole,
            backward_transient_bytes=node.backward_transient_bytes + whole + summed[unit] * is_block,
        )
    return replace(costs, nodes={**nodes, **changed})


def _by_unit(costs: Profile, blocks: Mapping[str, int]) -> Mapping[tuple[int | str, int], list[StateProfile]]:
    """Return the parameters of each block, or of a node outside of blocks; those of experts apart."""
    units: dict[tuple[int | str, int], list[StateProfile]] = {}
    for entry in costs.state.values():
        used = [blocks.get(name, name) for name in entry.uses if name in costs.nodes]
        if used and entry.is_parameter:
            unit = next((each for each in used if not isinstance(each, str)), used[0])
            units.setdefault((unit, entry.experts), []).append(entry)
    return units
