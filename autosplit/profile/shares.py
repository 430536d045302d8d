"""What a rank of a mesh has of every node: the interface between who finds placements and who costs.

A placement (which parameters are sharded, where values are gathered) is found elsewhere. All that its costs depend on
is, by stable node name, which part of a node's work and of its results one rank has, and which collectives its passes
wait for; and by parameter name, which part of it a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cost_models.collectives import Kind


@dataclass(frozen=True)
class Collective:
    """One collective per microbatch: its kind, and the stable name of the node or input whose whole value travels.

    ``over``: the ranks that take part; ``times``: their values together over what is recorded of one.
    """

    kind: Kind
    value: str
    over: Literal["tp", "cp", "ep"] = "tp"
    times: float = 1.0


@dataclass(frozen=True)
class NodeShare:
    """One rank's share of a node.

    Attributes:
        work: the part of its FLOPs, of the bytes that it reads and writes, and of its scratch.
        held: the part of its results and of what only it saves for the backward.
        forward, backward: the collectives that its passes wait for.
        whole: the value that it has whole in its passes only, of which the rank keeps its part; "" for none.
        inner: whether its product sums over the side that ranks share, as that of row products.
    """

    work: float = 1.0
    held: float = 1.0
    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    whole: str = ""
    inner: bool = False


@dataclass(frozen=True)
class TensorShares:
    """One rank's shares; nodes, inputs and parameters that are not named are whole.

    ``experts``: over how many ranks parameters of experts, and the nodes that only change their form, are divided.
    """

    nodes: Mapping[str, NodeShare] = field(default_factory=dict)
    states: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)

    def of(self, node: str) -> NodeShare:
        """Return a rank's share of a node."""
        return self.nodes.get(node, _WHOLE)

    def gathered(self, node: str, size: Callable[[str], float]) -> int:
        """Return the bytes that a node has whole while it runs, from the whole ``size`` of values: keys and values of
        all ranks, and what tensor-parallel ranks gather, as it comes in and put together."""
        share = self.of(node)
        keys = sum(each.times * size(each.value) for each in share.forward if each.over == "cp")
        return round(keys + (2 * size(share.whole) if share.whole else 0))


_WHOLE = NodeShare()
