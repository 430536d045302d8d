"""Repeated blocks are profiled once, in context: a graph without most of them stands for the whole.

    whole     pre   block 0   block 1   block 2   block 3  …  block n-1   post
    short     pre   block 0   block 1                         block n-1   post
                              template of blocks 1 … n-2

Block ``i`` takes values of block ``i-1`` and what all take alike, and nobody but block ``i+1`` takes its own. So what
the template allocates, saves and frees the others do too, on storages in the same places of their own, of the block
before and of the block behind. Expanding renames storages; it multiplies nothing approximately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from torch import fx, nn

from autosplit.profile.expand import BlockRun, Traces, Uneven, expanded_costs
from autosplit.profile.node_costs.fake import FakeRuns
from autosplit.profile.stage_trace.described import called
from autosplit.profile.stage_trace.kinds import StageKinds
from autosplit.profile.stage_trace.stage_graph import StageNodes
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.profile.types import NodeProfile, NodeTimes
from autosplit.schedule.memory.pieces import StageTrace
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode

_FEWEST = 4
"""A run of fewer blocks is profiled as it is."""
_DEEPEST = 4
"""How many numbered components of a module's path may name its block."""


Runs = tuple[BlockRun, ...]
"""Runs of blocks of which a shortened graph has three: the first, a template, and the last."""


def shorten(stage: StageNodes, *, behind: int = 0) -> tuple[StageNodes, Runs]:
    """Return a stage without the blocks that a template stands for, and the runs; the stage itself if there are none.

    ``behind``: how many blocks at the end of each run stay as they are.
    """
    all_runs = find_runs(stage.nodes, stage.root, outputs=stage.outputs)
    runs = tuple(run.without(behind) for run in all_runs if len(run.paths) >= _FEWEST + behind)
    if not runs:
        return stage, ()
    graph, copies, like = fx.Graph(), dict[fx.Node, fx.Node](), templates(runs)
    taken = {operand for node in stage.nodes if node not in like for operand in node.all_input_nodes}
    inputs = tuple(node for node in stage.inputs if node in taken)  # else it is lent to a block that is left out
    for node in (*stage.numbers, *inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    nodes = _copied(stage.nodes, runs, graph, copies)

    def copied(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(copies[node] for node in nodes)

    numbers, outputs = copied(stage.numbers), copied(stage.outputs)
    return StageNodes(stage.root, numbers, copied(inputs), nodes, outputs, stage.tied), runs


def shorten_graph(traced: TracedGraph) -> tuple[fx.Graph, Runs]:
    """Return a recording's graph without the blocks that others stand for, and their runs."""
    runs = tuple(find_runs([n for n in traced.graph.nodes if n.op not in ("placeholder", "output")], traced.root))
    if not runs:
        return traced.graph, ()
    graph = fx.Graph()
    _copied(traced.graph.nodes, runs, graph, {})
    return graph, runs


def _copied(
    nodes: Iterable[fx.Node], runs: Sequence[BlockRun], graph: fx.Graph, copies: dict[fx.Node, fx.Node]
) -> tuple[fx.Node, ...]:
    """Copy nodes into a graph, except for those of blocks that others stand for; enter the copies and return them."""
    like = templates(runs)
    kept = [node for node in nodes if node not in like]
    for node in kept:
        copies[node] = graph.node_copy(node, lambda operand: copies[like.get(operand, operand)])
        copies[node].meta = node.meta
    return tuple(copies[node] for node in kept)


def templates(runs: Sequence[BlockRun]) -> dict[fx.Node, fx.Node]:
    """Map the nodes of the blocks that others stand for to those of their templates."""
    blocks = ((run.nodes[1], block) for run in runs for block in run.nodes[2:-1])
    return {node: like for template, block in blocks for like, node in zip(template, block, strict=True)}


class CostMemo:
    """Costs of one recording at several sizes, each made once; under one autocast.

    ``mixes``: some nodes run on the whole batch.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self._traced = traced
        graph, self._blocks = shorten_graph(traced)
        self._short = replace(traced, graph=graph)
        self.mixes = any(info.node_class is NodeClass.FULL for _, info in traced.compute_nodes())
        self._runs: dict[Hashable, FakeRuns] = {}
        self._known: dict[Hashable, dict[str, NodeProfile]] = {}
        self._timed: dict[tuple[str, int], NodeProfile] = {}

    def costs(
        self,
        *,
        rows: int,
        batch_rows: int,
        input_grads: tuple[bool, ...] | None = None,
        kernels: Literal["cpu", "cuda"] = "cpu",
    ) -> dict[str, NodeProfile]:
        """Return what :func:`fake_costs` returns, from a run without most of the repeated blocks."""
        if self._blocks:
            with contextlib.suppress(Uneven):
                return self._costs(self._runs_of(self._short, input_grads, kernels), rows, batch_rows, self._blocks)
        return self._costs(self._runs_of(self._traced, input_grads, kernels), rows, batch_rows, ())

    def timed(self, cost: NodeProfile, times: NodeTimes, device: str) -> NodeProfile:
        """Return a node's costs with the times that a device's cost model gives."""
        if (device, id(cost)) not in self._timed:
            timed = replace(cost, forward_s=times.forward_s, backward_s=times.backward_s)
            self._timed[device, id(cost)] = timed
        return self._timed[device, id(cost)]

    def _runs_of(
        self, traced: TracedGraph, input_grads: tuple[bool, ...] | None, kernels: Literal["cpu", "cuda"]
    ) -> FakeRuns:
        key = id(traced), input_grads, kernels
        if key not in self._runs:
            self._runs[key] = FakeRuns(traced, input_grads=input_grads, kernels=kernels)
        return self._runs[key]

    def _costs(self, runs: FakeRuns, rows: int, batch_rows: int, blocks: Runs) -> dict[str, NodeProfile]:
        """Return the costs in model order; nodes of a batch cost the same whatever the size of its microbatches."""
        micro, full = runs.micro(rows), runs.full(batch_rows, rows=rows)
        costs: dict[str, NodeProfile] = {}
        for part, key in ((micro, (id(runs), rows)), (full, (id(runs), rows, batch_rows))):
            if key not in self._known:
                self._known[key] = expanded_costs(blocks, {**micro, **full}, of=part)
            costs |= self._known[key]
        return {info.name: costs[info.name] for _, info in self._traced.compute_nodes()}


def block_trace(stage: StageNodes, how: How, kinds: StageKinds | None = None) -> StageTrace:
    """Return what :func:`trace_stage` returns, from a run without most of the repeated blocks where they allow it.

    ``kinds`` holds what was traced of other stages, and takes what is traced now.

    The last block's backward begins with what the rest of the stage gives it, and may make sums in other places than
    those of the others: where it does not fit to them, it stays outside of its run. So it is where the whole stage runs
    again, which ends before its last node.
    """
    kinds = kinds or StageKinds()
    for behind in (1, 0) if how.whole else (0, 1):
        short, runs = shorten(stage, behind=behind)
        if runs:
            with contextlib.suppress(Uneven):
                return Traces(runs, kinds.trace(short, how)).expanded()
    return kinds.trace(stage, how)


# -- finding -----------------------------------------------------------------------------------------------------------
def find_runs(nodes: Sequence[fx.Node], root: nn.Module, *, outputs: Iterable[fx.Node] = ()) -> Iterator[BlockRun]:
    """Yield the runs of at least four equal blocks: modules whose paths end in a number, such as ``layers.7``.

    ``outputs`` are values that somebody else takes.
    """
    taken: set[fx.Node] = set()
    kept = frozenset(outputs)
    for depth in range(1, _DEEPEST + 1):
        for run in _Blocks(nodes, root, kept, depth, taken).runs():
            taken.update(node for block in run.nodes for node in block)
            yield run


class _Blocks:
    def __init__(
        self, nodes: Sequence[fx.Node], root: nn.Module, outputs: frozenset[fx.Node], depth: int, taken: set[fx.Node]
    ) -> None:
        self.root, self.outputs, self.nodes = root, outputs, frozenset(nodes)
        paths = _paths(nodes, depth)
        groups = [(path, tuple(block)) for path, block in groupby(nodes, key=paths.__getitem__)]
        counts: dict[str, int] = {}
        for path, _ in groups:
            counts[path] = counts.get(path, 0) + 1
        self.groups = [(p if counts[p] == 1 and taken.isdisjoint(block) else "", block) for p, block in groups]

    def runs(self) -> Iterator[BlockRun]:
        """Yield maximal runs: every block like the one before it, except for the first, whose inputs may be others."""
        blocks: list[tuple[str, tuple[fx.Node, ...]]] = []
        like: Hashable = None
        for path, block in [*self.groups, ("", ())]:
            kind = self._kind(path, block, blocks[-1][1] if blocks else ()) if path else None
            if path and len(blocks) == 1 and not self._leaks(blocks[0][1], block) and len(block) == len(blocks[0][1]):
                like = kind
            if not (path and blocks and kind == like and not self._leaks(blocks[-1][1], block)):
                yield from self._run(blocks)
                blocks, like = [], None
            if path:
                blocks.append((path, block))

    @staticmethod
    def _run(blocks: Sequence[tuple[str, tuple[fx.Node, ...]]]) -> Iterator[BlockRun]:
        if len(blocks) >= _FEWEST:
            yield BlockRun(tuple(path for path, _ in blocks), tuple(block for _, block in blocks))

    def _leaks(self, block: Sequence[fx.Node], following: Sequence[fx.Node]) -> bool:
        """Tell whether anybody but the block itself and the next one takes its values."""
        near = {*block, *following}
        return any(node in self.outputs or not near.issuperset(node.users) for node in block)

    def _kind(self, path: str, block: Sequence[fx.Node], before: Sequence[fx.Node]) -> Hashable:
        """Return all that what a block does may depend on."""
        places: dict[fx.Node, Hashable] = {node: ("before", number) for number, node in enumerate(before)}
        places |= {node: ("own", number) for number, node in enumerate(block)}
        lent = dict.fromkeys(n for node in block for n in node.all_input_nodes if self._is_lent(n, block))
        places |= {node: ("lent", number, _known(node, path)) for number, node in enumerate(lent)}

        return tuple((called(node, self.root, places), _known(node, path)) for node in block)

    def _is_lent(self, node: fx.Node, block: Sequence[fx.Node]) -> bool:
        """Tell whether a value comes from outside for one block alone and is the same for all microbatches."""
        info: TracedNode | None = node.meta.get(INFO)
        shared = info is not None and node not in self.nodes and info.node_class is NodeClass.SHARED
        return shared and set(node.users).issubset(block)


def _paths(nodes: Sequence[fx.Node], depth: int) -> dict[fx.Node, str]:
    """Map nodes to the path of their block; a number or parameter goes with the first node that takes it."""
    paths: dict[fx.Node, str] = {}
    path_of: dict[str, str] = {}
    for node in reversed(nodes):
        info: TracedNode | None = node.meta.get(INFO)
        if info is not None:
            if info.module not in path_of:
                path_of[info.module] = _block_path(info.module, depth)
            paths[node] = path_of[info.module]
        else:
            paths[node] = next((paths[user] for user in node.users if user in paths), "")
    return paths


def _block_path(module: str, depth: int) -> str:
    parts = module.split(".")
    numbered = [index for index, name in enumerate(parts) if name.isdecimal()]
    return ".".join(parts[: numbered[depth - 1] + 1]) if len(numbered) >= depth else ""


def _known(node: fx.Node, path: str) -> Hashable:
    info: TracedNode | None = node.meta.get(INFO)
    if info is None:
        return None
    reads = tuple(name.removeprefix(f"{path}.") for name in info.reads)
    return info.node_class, info.tensors, reads, info.random, info.mutated, bool(info.writes), info.whole
