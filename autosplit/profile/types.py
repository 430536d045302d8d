"""What a node, a parameter and a whole recording cost, by stable node name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autosplit.profile.node_costs.ledger import Operation
from autosplit.profile.shares import TensorShares


@dataclass(frozen=True)
class SplitBackward:
    """Seconds of a backward in two parts: the input gradient, and the weight gradients that are put off."""

    input_s: float
    weight_s: float


@dataclass(frozen=True)
class NodeProfile:
    """Cost of one node for one microbatch of ``Profile.rows`` rows (``full`` and ``shared`` nodes: for one step).

    ``saved`` maps the storages that autograd keeps for the backward (parameters, buffers and model inputs excluded)
    to their bytes; equal ids in two nodes are one storage. ``outputs`` maps the storages of the node's results
    likewise; ``output_bytes`` counts the elements of the results, views too: what a transfer carries.
    ``requires_grad``: gradients flow through the results. ``forward_operations`` and ``backward_operations`` list what
    ran, for a cost model; the seconds are 0 until one, or a clock, gives them. ``split`` is what the backward takes in
    two parts, where that was measured. ``estimated`` says why the node, or its backward, could not run on fake tensors
    (its costs are then estimates), and is None when it did.
    """

    name: str
    forward_operations: tuple[Operation, ...]
    backward_operations: tuple[Operation, ...]
    output_bytes: int
    saved: Mapping[int, int]
    outputs: Mapping[int, int]
    forward_transient_bytes: int
    backward_transient_bytes: int
    requires_grad: bool = True
    estimated: str | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    split: SplitBackward | None = None

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward."""
        return sum(operation.flops for operation in self.forward_operations)

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward."""
        return sum(operation.flops for operation in self.backward_operations)


@dataclass(frozen=True)
class StateProfile:
    """One parameter or buffer: its size and the nodes that read it, in model order; ``shape``: the whole's.

    ``experts``: over how many expert-parallel ranks its experts are divided; its size is one rank's then.
    """

    name: str
    elements: int
    bytes: int
    trainable: bool
    is_parameter: bool
    uses: tuple[str, ...]
    shape: tuple[int, ...] = ()
    experts: int = 1


@dataclass(frozen=True)
class Profile:
    """Cost of every node of one recording.

    Attributes:
        rows: batch rows of the microbatch that was profiled.
        nodes: by stable node name, inputs excluded.
        state: parameters and buffers by qualified name (each object once, under its first name).
        input_bytes: bytes of each input placeholder at ``rows``, by stable name.
        input_grads: whether each input wants a gradient, likewise.
        times: what was measured, and on which device; without nodes where all times come from that device's cost model.
        shares: what of the nodes and the state the rank has whose costs these are.
        before_loss: the node that also computes the loss, as it is without.
    """

    rows: int
    nodes: Mapping[str, NodeProfile]
    state: Mapping[str, StateProfile]
    input_bytes: Mapping[str, int]
    times: MeasuredTimes
    input_grads: Mapping[str, bool] = field(default_factory=dict)
    shares: TensorShares = field(default_factory=TensorShares)
    before_loss: NodeProfile | None = None

    def bytes_of(self, name: str) -> int:
        """Return the bytes of what a node gives, of a parameter, or of an input."""
        if name in self.nodes:
            return self.nodes[name].output_bytes
        state = self.state.get(name)
        return self.input_bytes[name] if state is None else state.bytes

    @property
    def measured(self) -> bool:
        """Whether the times were measured; else they come from a cost model."""
        return bool(self.times.nodes)

    @property
    def estimated(self) -> dict[str, str]:
        """The nodes whose FLOPs and bytes are estimates because they could not run on fake tensors, and why."""
        return {name: node.estimated for name, node in self.nodes.items() if node.estimated is not None}

    @property
    def modelled(self) -> dict[str, str]:
        """The nodes of a measured profile whose times are a cost model's in the measured scale, and why."""
        if not self.measured:
            return {}
        mixing = "it runs once per step, on the whole batch, or needs what does"
        return {name: self.times.out_of_memory.get(name, mixing) for name in self.nodes if name not in self.times.nodes}


@dataclass(frozen=True)
class NodeTimes:
    """Times of one node: a cost model's, or the medians of samples; ``backward_s`` is 0 without a backward."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeasuredNode(NodeTimes):
    """What was measured of one node: medians, how far the samples lie apart, and the device's own count of bytes.

    Attributes:
        forward_range_s: lower and upper quartile of the forward's samples; ``backward_range_s`` likewise.
        samples: how many there were, those of nodes that do the same work included.
        split: medians of the backward in two parts; the whole of it and nothing where no weight gradient can wait.
        forward_peak_bytes: the most that the device held during the forward, above what it held before the node ran;
            None where nobody counted. ``backward_peak_bytes``: during the backward, above the same.
    """

    forward_range_s: tuple[float, float]
    backward_range_s: tuple[float, float]
    samples: int
    split: SplitBackward
    forward_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None


@dataclass(frozen=True)
class MeasuredTimes:
    """Times by stable node name; ``full`` nodes and what depends on them are missing.

    Attributes:
        nodes: the nodes that ran.
        device: the device that they ran on, as text.
        out_of_memory: the nodes that did not run because memory ran out, and why: they, or what they need, did not fit.
        workspaces: bytes of scratch that the device's kernels were seen to hold, by `operation_key`; None where the
            device does not count bytes.
    """

    nodes: Mapping[str, MeasuredNode]
    device: str
    out_of_memory: Mapping[str, str] = field(default_factory=dict)
    workspaces: Mapping[str, int] | None = None
