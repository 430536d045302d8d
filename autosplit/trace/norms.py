"""Which recorded calls are norms that keep running statistics."""

from __future__ import annotations

from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm

from autosplit.trace.graph import INFO, NodeClass
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
