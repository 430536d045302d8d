"""What in-place changes demand: nodes that share a stage and pairs that keep their order.

A storage or a buffer that some call changes is a register: whoever touched it before the change comes before, whoever
touches it after comes after, and the producer of a storage stays with all who change it. So do a storage's views with
who reads it by strides: a copy, as a transfer or a merge makes it, has others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autosplit.trace.recording import Call

Pair = tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class Effects:
    """Effects between fx nodes.

    Attributes:
        flow: (a node that changes a register, a later node that sees the change).
        order: (a node that touches a register, a later node that changes it).
        storages: per storage that is changed or read by strides its producers and changers until the last of these; of
            an input, whoever touches it.
        buffers: per changed buffer everyone who touches it.
        mutated: nodes whose result's storage is changed.
    """

    flow: tuple[Pair, ...]
    order: tuple[Pair, ...]
    storages: tuple[tuple[fx.Node, ...], ...]
    buffers: tuple[tuple[fx.Node, ...], ...]
    mutated: frozenset[fx.Node]

    def pairs(self) -> tuple[Pair, ...]:
        """Return all pairs that keep their order."""
        return self.flow + self.order


def effects(calls: Sequence[Call], nodes: Mapping[int, fx.Node]) -> Effects:
    """Collect the effects of all recorded calls."""
    touched: dict[object, list[int]] = defaultdict(list)
    changed: dict[object, set[int]] = defaultdict(set)
    strided: dict[object, int] = {}
    for index, call in enumerate(calls):
        if index not in nodes:
            continue
        for register in dict.fromkeys((*call.storages, *call.reads_storages, *call.reads, *call.views, *call.writes)):
            touched[register].append(index)
        for name in call.writes:
            changed[name].add(index)
        for storage in call.mutates:
            changed[storage].add(index)
        if call.kind == "function" and getattr(call.target, "__name__", "") == "as_strided":
            strided.update(dict.fromkeys(call.storages, index))
    flow: dict[Pair, None] = {}
    order: dict[Pair, None] = {}
    storages, buffers = [], []
    mutated: set[fx.Node] = set()
    for register in dict.fromkeys((*changed, *strided)):
        writers, users = changed.get(register, set()), touched[register]
        for writer in sorted(writers):
            flow.update({(nodes[writer], nodes[user]): None for user in users if user > writer})
            order.update({(nodes[user], nodes[writer]): None for user in users if user < writer})
        if isinstance(register, str):
            buffers.append(tuple(nodes[user] for user in users))
            continue
        holders = [i for i in users if register in calls[i].storages]
        if writers:
            mutated.update(nodes[i] for i in holders)
        inputs = {i for i in holders if calls[i].kind == "input"}
        last = max((*writers, strided.get(register, -1)))
        together = [i for i in (users if inputs else holders) if i <= last]
        storages.append(tuple(nodes[i] for i in sorted({*together, *writers} - inputs)))
    return Effects(tuple(flow), tuple(order), tuple(storages), tuple(buffers), frozenset(mutated))
