"""Which recorded calls are norms that keep running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm

from autosplit.trace.graph import INFO, NodeClass, TracedGraph
from autosplit.trace.kinds import function_of
from autosplit.trace.scope import STATEFUL_LEAVES


def keeps_statistics(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node writes buffers as batch norm does: per microbatch is what it is meant to do."""
    function = function_of(node, root)
    return isinstance(function, STATEFUL_LEAVES) or function in (F.batch_norm, F.instance_norm)


def normalises_rows_apart(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a norm takes every row by itself, as instance norm does; only its running statistics average."""
    function = function_of(node, root)
    return isinstance(function, _InstanceNorm) or function is F.instance_norm


def counts_by_microbatch(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node is a norm that takes its statistics from one microbatch after the other."""
    info = node.meta.get(INFO)
    micro = info is not None and bool(info.writes) and info.node_class is NodeClass.MICRO
    return micro and keeps_statistics(node, root)


def note_rewritten(graph: fx.Graph, root: nn.Module) -> None:
    """Write down at the nodes of a classified graph which buffers they take that the forward changes.

    What norms count by microbatch is changed when the step is over, and their second run does not read it.
    """
    written = {name for node in graph.nodes if INFO in node.meta for name in node.meta[INFO].writes}
    buffers = {name for name, _ in root.named_buffers()} & written
    for node in graph.nodes if buffers else ():
        if INFO in node.meta and not counts_by_microbatch(node, root):
            taken = tuple(name for name in sorted(buffers) if any(map(name.startswith, _paths(node))))
            node.meta[INFO] = replace(node.meta[INFO], rewritten=taken)


def _paths(node: fx.Node) -> list[str]:
    """Return what names of tensors begin with that a node takes from the model itself."""
    taken = [str(operand.target) for operand in node.all_input_nodes if operand.op == "get_attr"]
    return [*taken, f"{node.target}."] if node.op == "call_module" else taken


def norm_notes(traced: TracedGraph) -> Iterator[str]:
    """Yield what is to be said of a recording's batch norms: whose numbers theirs are."""
    nodes = [node for node, info in traced.compute_nodes() if info.writes and keeps_statistics(node, traced.root)]
    nodes = [node for node in nodes if not normalises_rows_apart(node, traced.root)]
    names = [n.meta[INFO].name for n in nodes if n.meta[INFO].node_class is NodeClass.MICRO]
    whole = [n.meta[INFO].name for n in nodes if n.meta[INFO].node_class is NodeClass.FULL]
    if names:
        layers = "1 batch norm layer normalises" if len(names) == 1 else f"{len(names)} batch norm layers normalise"
        yield (
            f"{layers} each microbatch by itself; running statistics move once per step, by all rows: the plain "
            f"model's for the first ({names[0]}), behind it those of what was normalised by microbatch"
        )
    if whole:
        layers = "1 batch norm layer sees" if len(whole) == 1 else f"{len(whole)} batch norm layers see"
        yield f"{layers} the whole batch, as in the plain model; what comes behind {whole[0]} does not overlap"
