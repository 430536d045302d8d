"""Times of nodes, modelled or measured: plain numbers, by stable node name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_models.workspaces import Workspaces


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
        forward_peak_bytes: the most that the device held during the forward, above what it held before the node ran;
            None where nobody counted. ``backward_peak_bytes``: during the backward, above the same.
    """

    forward_range_s: tuple[float, float]
    backward_range_s: tuple[float, float]
    samples: int
    forward_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None


@dataclass(frozen=True)
class MeasuredTimes:
    """Times by stable node name; ``full`` nodes and what depends on them are missing.

    Attributes:
        nodes: the nodes that ran.
        device: the device that they ran on, as text.
        out_of_memory: the nodes that did not run because memory ran out, and why: they, or what they need, did not fit.
        workspaces: what the device's kernels were seen to hold; None where the device does not count bytes.
    """

    nodes: Mapping[str, MeasuredNode]
    device: str
    out_of_memory: Mapping[str, str] = field(default_factory=dict)
    workspaces: Workspaces | None = None
