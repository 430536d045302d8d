"""Apply an assignment by stable names to a recording: also one with other nodes, of another mode or length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from autosplit.options import Options
from autosplit.planning.plan.record import Boundary
from autosplit.planning.profiled.specs import link_seconds
from autosplit.profile.types import Profile
from autosplit.tensor.collectives import Move
from autosplit.trace.graph import INFO, NodeClass, TracedGraph


class DataflowIndex:
    """What feeds the nodes of a recording, found once for all the cuts that are made of it."""

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self.sources = {node: sources(node) for node, _ in traced.compute_nodes()}
        self.consumers: dict[fx.Node, list[fx.Node]] = {}
        for node, feeding in self.sources.items():
            for source in feeding:
                self.consumers.setdefault(source, []).append(node)
        self.early = [(node, info) for node, info in traced.compute_nodes() if info.node_class is not NodeClass.FULL]
        by_name = {node.name: node for node, _ in self.early}
        self.before = {node: [d for d in self.sources[node] if d.name in by_name] for node, _ in self.early}
        for first, second in traced.order:
            if first in by_name and second in by_name:
                self.before[by_name[second]].append(by_name[first])


def assign(index: DataflowIndex, stage_of: Mapping[str, int], *, stages: int) -> dict[str, int]:
    """Return a legal stage for every tensor-computing node of a recording.

    A name that the assignment lacks goes to the last stage of its module (or of the nearest module around it, or of the
    node before); a move between ranks that share tensors to that of the value that it moves. Operations of a module
    that lies on several stages are told apart by numbers, which are others in another recording: they go no further
    than what takes their values in modules of one stage. Then stages are raised until data flows forward and colocation
    groups are together. Full nodes are on the last stage, whatever their group; shared ones where they are used first,
    or where nodes of their group are that run for every microbatch.
    """
    traced = index.traced
    wanted = _wanted(index, stage_of)
    placed = {node: wanted[info.name] if info.node_class is NodeClass.MICRO else 0 for node, info in index.early}
    _raise_stages(index, placed)
    result = {info.name: placed[node] for node, info in index.early if info.node_class is NodeClass.MICRO}
    result.update({info.name: stages - 1 for _, info in traced.compute_nodes() if info.node_class is NodeClass.FULL})
    _place_shared(index, result)
    return result


def _raise_stages(index: DataflowIndex, placed: dict[fx.Node, int]) -> None:
    """Raise stages until no node is before what feeds it, and nodes of one colocation group are on one stage."""
    together: dict[int, int] = {}
    for node, info in index.early:
        if info.colocation_group is not None:
            together[info.colocation_group] = max(placed[node], together.get(info.colocation_group, 0))
    changed = True
    while changed:
        changed = False
        for node, info in index.early:
            lowest = placed[node]
            for source in index.before[node]:
                lowest = max(lowest, placed[source])
            if info.colocation_group is not None:
                lowest = together[info.colocation_group] = max(lowest, together[info.colocation_group])
            if lowest != placed[node]:
                placed[node] = lowest
                changed = True


def _wanted(index: DataflowIndex, stage_of: Mapping[str, int]) -> dict[str, int]:
    last: dict[str, int] = {}
    for name, stage in stage_of.items():
        path = name.split("#")[0]
        last[path] = max(stage, last.get(path, 0))
    wanted: dict[str, int] = {}
    previous = 0
    for node, info in index.traced.compute_nodes():
        known = stage_of.get(info.name)
        if known is None and _is_move(index.traced, node):
            moved = (source.meta[INFO].name for source in index.sources[node])
            wanted[info.name] = max((wanted.get(name, 0) for name in moved), default=0)
            continue
        if known is None:
            path = info.name.split("#")[0]
            while known is None and path:
                known = last.get(path)
                path = path.rpartition(".")[0]
        previous = previous if known is None else known
        wanted[info.name] = previous
    _limit(index, stage_of, wanted)
    return wanted


def _limit(index: DataflowIndex, stage_of: Mapping[str, int], wanted: dict[str, int]) -> None:
    """Lower the stages of nodes whose names may be those of others, to where modules of one stage take their values."""
    spread: dict[str, set[int]] = {}
    for name, stage in stage_of.items():
        spread.setdefault(name.split("#")[0], set()).add(stage)
    others = {name.split("#")[0] for name in stage_of.keys() ^ wanted.keys()}
    limits: dict[fx.Node, int] = {}
    for node, info in reversed(index.early):
        path = info.name.split("#")[0]
        if path in others and len(spread.get(path, ())) != 1:
            taken = [limits[taker] for taker in index.consumers.get(node, ()) if taker in limits]
            if not taken:
                continue
            wanted[info.name] = min(wanted[info.name], *taken)
            limits[node] = min(taken)
        else:
            limits[node] = wanted[info.name]


def _is_move(traced: TracedGraph, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(traced.root.get_submodule(str(node.target)), Move)


def sources(node: fx.Node) -> list[fx.Node]:
    """Return the tensor nodes behind a node's operands, through sizes and plumbing; attributes are none."""
    tensors = []
    for operand in node.all_input_nodes:
        tensors += [operand] if INFO in operand.meta else sources(operand)
    return tensors


def _place_shared(index: DataflowIndex, placed: dict[str, int]) -> None:
    traced = index.traced
    shared = [(node, info) for node, info in traced.compute_nodes() if info.node_class is NodeClass.SHARED]
    together: dict[str, list[fx.Node]] = {}
    by_name = {node.name: node for node, _ in shared}
    for first, second in traced.order:
        if first in by_name and second in by_name:
            together.setdefault(first, []).append(by_name[second])
    groups = {info.colocation_group: placed[info.name] for _, info in index.early if info.name in placed}
    fixed, before = frozenset(groups), None
    while before != groups:  # a group goes where its first user is, and may take what feeds it along
        before = groups.copy()
        for node, info in reversed(shared):
            users = [*index.consumers.get(node, ()), *together.get(node.name, ())]
            stage, group = min((placed[u.meta[INFO].name] for u in users), default=0), info.colocation_group
            if group is not None and group not in fixed:
                groups[group] = min(stage, groups.get(group, stage))
            placed[info.name] = stage if group is None else groups[group]
    for node, info in shared:
        for first, second in traced.order:
            if second == node.name and first in by_name:
                placed[info.name] = max(placed[info.name], placed[by_name[first].meta[INFO].name])


def boundaries_of(index: DataflowIndex, costs: Profile, stage_of: Mapping[str, int]) -> Iterator[Boundary]:
    """Yield the values that cross a cut, in model order: of inputs, of operations, then parameters with copies."""
    yield from _crossing((node for node in index.traced.graph.nodes if INFO in node.meta), costs, stage_of, index)
    for state in costs.state.values():
        stages = sorted({stage_of[name] for name in state.uses})
        if len(stages) > 1:
            yield Boundary(
                value=state.name, producer=stages[0], consumers=tuple(stages[1:]), bytes=state.bytes, per_step=True
            )


def _crossing(
    values: Iterable[fx.Node], costs: Profile, stage_of: Mapping[str, int], index: DataflowIndex
) -> Iterator[Boundary]:
    for node in values:
        info = node.meta[INFO]
        producer = -1 if node.op == "placeholder" else stage_of[info.name]
        stages = {stage_of[user.meta[INFO].name] for user in index.consumers.get(node, ())}
        others = tuple(sorted(stages - {producer}))
        once = info.node_class is not NodeClass.MICRO
        if others and not (producer >= 0 and once and info.node_class is NodeClass.FULL):
            size = costs.input_bytes[info.name] if producer < 0 else costs.nodes[info.name].output_bytes
            yield Boundary(value=info.name, producer=producer, consumers=others, bytes=size, per_step=once)


def cut_sent_s(index: DataflowIndex, costs: Profile, stage_of: Mapping[str, int], options: Options) -> float:
    """Return what `sent_s` does of a cut's boundaries, from those alone that are sent once per step."""
    values = (node for node, info in index.traced.compute_nodes() if info.node_class is NodeClass.SHARED)
    return sent_s(tuple(_crossing(values, costs, stage_of, index)), costs, options)


def sent_s(boundaries: Sequence[Boundary], costs: Profile, options: Options) -> float:
    """Return how long shared values travel, there and back; copies of parameters are in the partition's step."""
    return 2 * sum(
        link_seconds(options, boundary.bytes) * len(boundary.consumers)
        for boundary in boundaries
        if boundary.per_step and boundary.producer >= 0 and boundary.value not in costs.state
    )
