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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import fx, nn

from autosplit.memory.pieces import StageTrace
from autosplit.profile.expand import Costs, Run, Traces, Uneven
from autosplit.profile.node_costs.fake import FakeCosts, NodeCosts, fake_costs
from autosplit.profile.stage_trace.stage_graph import StageGraph
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode

_FEWEST = 4
"""A run of fewer blocks is profiled as it is."""
_DEEPEST = 4
"""How many numbered components of a module's path may name its block."""


@dataclass(frozen=True)
class Short:
    """A stage's graph without most of its repeated blocks, and how to give them back."""

    stage: StageGraph
    runs: tuple[Run, ...]

    def trace(self, short: StageTrace) -> StageTrace:
        """Return the trace of the whole stage from that of the short one; raises Uneven."""
        return Traces(self.runs, short).expanded()


@dataclass(frozen=True)
class ShortGraph:
    """A graph without the blocks that others stand for; ``copies`` maps the nodes that it has from the whole one's."""

    graph: fx.Graph
    copies: Mapping[fx.Node, fx.Node]
    runs: tuple[Run, ...]

    @property
    def without(self) -> tuple[str, ...]:
        """Paths of the modules that it does not use."""
        return tuple(path for run in self.runs for path in run.paths[2:-1])

    def costs(self, short: Mapping[str, NodeCosts]) -> dict[str, NodeCosts]:
        """Return the costs of all nodes from those of the short graph; raises Uneven."""
        return Costs(self.runs, short).expanded()


def shorten(stage: StageGraph, *, behind: int = 0) -> Short:
    """Return a stage without the blocks that others stand for; the same one where there are none.

    ``behind``: how many blocks at the end of each run stay as they are.
    """
    found = shorten_graph(stage.graph, stage.root, outputs=stage.outputs, behind=behind)
    if not found.runs:
        return Short(stage, ())

    def copied(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(found.copies[node] for node in nodes)

    short = replace(
        stage,
        graph=found.graph,
        numbers=copied(stage.numbers),
        inputs=copied(stage.inputs),
        outputs=copied(stage.outputs),
        without=(*stage.without, *found.without),
    )
    return Short(short, found.runs)


def shorten_graph(graph: fx.Graph, root: nn.Module, *, outputs: Iterable[fx.Node] = (), behind: int = 0) -> ShortGraph:
    """Return a graph without the blocks that others stand for; ``outputs`` are values that somebody else takes."""
    found = find_runs(graph, root, outputs=outputs)
    runs = tuple(run.without(behind) for run in found if len(run.paths) >= _FEWEST + behind)
    skipped: dict[fx.Node, fx.Node] = {}
    for run in runs:
        for block in run.nodes[2:-1]:
            skipped |= zip(block, run.nodes[1], strict=True)
    short, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes if runs else ():
        if node not in skipped:
            copies[node] = short.node_copy(node, lambda operand: copies[skipped.get(operand, operand)])
            copies[node].meta = node.meta
    return ShortGraph(short if runs else graph, copies, runs)


class CostMemo:
    """What is known of one recording from its costs at other sizes, or on other devices; under one autocast."""

    def __init__(self) -> None:
        self.costs: dict[Hashable, FakeCosts] = {}
        self._traced: TracedGraph | None = None
        self._short: ShortGraph | None = None

    def short(self, traced: TracedGraph) -> ShortGraph:
        """Return the recording's graph without the blocks that others stand for."""
        if self._traced is not traced or self._short is None:
            self._traced, self._short = traced, shorten_graph(traced.graph, traced.root)
            self.costs.clear()
        return self._short


def block_costs(
    traced: TracedGraph,
    *,
    rows: int,
    batch_rows: int,
    input_grads: Sequence[bool] | None = None,
    kernels: Literal["cpu", "cuda"] = "cpu",
    memo: CostMemo | None = None,
) -> FakeCosts:
    """Return what :func:`fake_costs` returns, from a run without most of the repeated blocks."""
    memo = memo or CostMemo()
    short = memo.short(traced)
    key = rows, batch_rows, None if input_grads is None else tuple(input_grads), kernels
    if key not in memo.costs:
        memo.costs[key] = _block_costs(
            traced, short, rows=rows, batch_rows=batch_rows, input_grads=input_grads, kernels=kernels
        )
    return memo.costs[key]


def _block_costs(
    traced: TracedGraph,
    short: ShortGraph,
    *,
    rows: int,
    batch_rows: int,
    input_grads: Sequence[bool] | None,
    kernels: Literal["cpu", "cuda"],
) -> FakeCosts:
    if short.runs:
        own = replace(traced, graph=short.graph)
        found = fake_costs(
            own,
            rows=rows,
            batch_rows=batch_rows,
            input_grads=input_grads,
            without=short.without,
            kernels=kernels,
        )
        with contextlib.suppress(Uneven):
            costs = short.costs(found.nodes)
            return FakeCosts({info.name: costs[info.name] for _, info in traced.compute_nodes()})
    return fake_costs(traced, rows=rows, batch_rows=batch_rows, input_grads=input_grads, kernels=kernels)


def block_trace(
    stage: StageGraph, how: How, *, run: Callable[[StageGraph, How], StageTrace] | None = None
) -> StageTrace:
    """Return what :func:`trace_stage` returns, from a run without most of the repeated blocks where they allow it.

    ``run`` traces a stage as it is; None: :func:`trace_stage`.

    The last block's backward begins with what the rest of the stage gives it, and may make sums in other places than
    those of the others: where it does not fit to them, it stays outside of its run. So it is where the whole stage runs
    again, which ends before its last node.
    """
    run = run or trace_stage
    for behind in (1, 0) if how.whole else (0, 1):
        short = shorten(stage, behind=behind)
        if short.runs:
            with contextlib.suppress(Uneven):
                return short.trace(run(short.stage, how))
    return run(stage, how)


# -- finding -----------------------------------------------------------------------------------------------------------
def find_runs(graph: fx.Graph, root: nn.Module, *, outputs: Iterable[fx.Node] = ()) -> Iterator[Run]:
    """Yield the runs of at least four equal blocks: modules whose paths end in a number, such as ``layers.7``."""
    taken: set[fx.Node] = set()
    kept = frozenset(outputs)
    for depth in range(1, _DEEPEST + 1):
        for run in _Blocks(graph, root, kept, depth, taken).runs():
            taken.update(node for block in run.nodes for node in block)
            yield run


class _Blocks:
    def __init__(
        self, graph: fx.Graph, root: nn.Module, outputs: frozenset[fx.Node], depth: int, taken: set[fx.Node]
    ) -> None:
        self.root, self.outputs = root, outputs
        nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        paths = _paths(nodes, depth)
        groups = [(path, tuple(own)) for path, own in groupby(nodes, key=paths.__getitem__)]
        counts: dict[str, int] = {}
        for path, _ in groups:
            counts[path] = counts.get(path, 0) + 1
        self.groups = [(p if counts[p] == 1 and taken.isdisjoint(own) else "", own) for p, own in groups]
        self.kinds: dict[str, Hashable] = {}

    def runs(self) -> Iterator[Run]:
        """Yield maximal runs: every block like the one before it, but for the first, whose inputs may be others."""
        blocks: list[tuple[str, tuple[fx.Node, ...]]] = []
        like: Hashable = None
        for path, own in [*self.groups, ("", ())]:
            kind = self._kind(path, own, blocks[-1][1] if blocks else ()) if path else None
            if path and len(blocks) == 1 and not self._leaks(blocks[0][1], own) and len(own) == len(blocks[0][1]):
                like = kind
            if not (path and blocks and kind == like and not self._leaks(blocks[-1][1], own)):
                yield from self._run(blocks)
                blocks, like = [], None
            if path:
                blocks.append((path, own))

    @staticmethod
    def _run(blocks: Sequence[tuple[str, tuple[fx.Node, ...]]]) -> Iterator[Run]:
        if len(blocks) >= _FEWEST:
            yield Run(tuple(path for path, _ in blocks), tuple(own for _, own in blocks))

    def _leaks(self, own: Sequence[fx.Node], following: Sequence[fx.Node]) -> bool:
        """Tell whether anybody but the block itself and the next one takes its values."""
        near = {*own, *following}
        return any(node in self.outputs or not near.issuperset(node.users) for node in own)

    def _kind(self, path: str, own: Sequence[fx.Node], before: Sequence[fx.Node]) -> Hashable:
        """Return all that what a block does may depend on."""
        places: dict[fx.Node, Hashable] = {node: ("before", number) for number, node in enumerate(before)}
        places |= {node: ("own", number) for number, node in enumerate(own)}
        lent = dict.fromkeys(operand for node in own for operand in node.all_input_nodes if _is_lent(operand, own))
        places |= {node: ("lent", number, _known(node, path)) for number, node in enumerate(lent)}

        return tuple(
            (
                node.op,
                self._target(node),
                described(node.args, places),
                described(node.kwargs, places),
                _known(node, path),
            )
            for node in own
        )

    def _target(self, node: fx.Node) -> Hashable:
        return target_kind(node.op, str(node.target), self.root)[0] if node.op in LOOKED_UP else node.target


def _paths(nodes: Sequence[fx.Node], depth: int) -> dict[fx.Node, str]:
    """Map nodes to the path of their block; a number or parameter goes with the first node that takes it."""
    found: dict[fx.Node, str] = {}
    path_of: dict[str, str] = {}
    for node in reversed(nodes):
        info: TracedNode | None = node.meta.get(INFO)
        if info is not None:
            if info.module not in path_of:
                path_of[info.module] = _block_path(info.module, depth)
            found[node] = path_of[info.module]
        else:
            found[node] = next((found[user] for user in node.users if user in found), "")
    return found


def _block_path(module: str, depth: int) -> str:
    parts = module.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[depth - 1] + 1]) if len(numbered) >= depth else ""


def _is_lent(node: fx.Node, block: Sequence[fx.Node]) -> bool:
    """Tell whether a value comes from outside for one block alone and is the same for all microbatches."""
    info: TracedNode | None = node.meta.get(INFO)
    shared = info is not None and node.op == "placeholder" and info.node_class is NodeClass.SHARED
    return shared and set(node.users).issubset(block)


def _known(node: fx.Node, path: str) -> Hashable:
    info: TracedNode | None = node.meta.get(INFO)
    if info is None:
        return None
    reads = tuple(name.removeprefix(f"{path}.") for name in info.reads)
    return info.node_class, info.tensors, reads, info.random, info.mutated, bool(info.writes), info.whole


def described(value: Any, places: Mapping[fx.Node, Any]) -> Hashable:
    """Return an argument of a node as a key: nodes by their places, other values by type and text."""
    if isinstance(value, fx.Node):
        return places.get(value, ("outside", value.name))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(described(item, places) for item in value))
    if isinstance(value, dict):
        return tuple((key, described(item, places)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(described(part, places) for part in (value.start, value.stop, value.step)))
    return (type(value).__name__, repr(value))


def module_kind(module: nn.Module) -> Hashable:
    """Return what a leaf module does, as a key; one that is not torch's own, or has hooks, is like none."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooks or not type(module).__module__.startswith("torch.nn"):
        return id(module)
    state = ((name, tensor_kind(t)) for name, t in (*module.named_parameters(), *module.named_buffers()))
    return (type(module), repr(module), module.training, *state)


def tensor_kind(tensor: torch.Tensor) -> Hashable:
    """Return what a parameter, buffer or constant is like, but for its values."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)


LOOKED_UP = ("call_module", "get_attr")
"""Operations whose target is a path in the model."""


def target_kind(op: str, path: str, root: nn.Module) -> tuple[Hashable, tuple[torch.Tensor, ...]]:
    """Return what a path in the model stands for, as a key, and the parameters and buffers there."""
    if op == "call_module":
        module = root.get_submodule(path)
        return module_kind(module), (*module.parameters(), *module.buffers())
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return (tensor_kind(value), (value,)) if isinstance(value, torch.Tensor) else (id(value), ())
