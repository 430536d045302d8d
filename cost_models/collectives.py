"""How long a collective of many devices takes, from the links between them.

```
    island 0           island 1        an island: devices with a peer link between any two of them
    [0]══[1]══[2]      [3]══[4]══[5]   ═  inner link: a device's own, to all of its island
     │    │    │        │    │    │    │  outer link: each device's own way to other islands
     └────┴────┴─network┴────┴────┘
```

Four algorithms are weighed, and the fastest is taken, as NCCL does (``src/graph/tuning.cc``):

- *ring*: every device sends to its neighbour. The traffic between two islands is spread over all devices of an island.
- *tree*: two pipelined binary trees, for all-reduces: as many bytes, a latency that grows with the logarithm.
- *hierarchical*: inside the islands first, between them on a part of the bytes, and inside again.

Bandwidths are those of the links times `REACHED`. Rabenseifner 2004 and Thakur et al. 2005 derive the formulas;
Sanders et al. 2009 the two trees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cost_models.machines import MachineSpec
from cost_models.specs import LinkSpec

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

REACHED = 0.8
"""The part of a link's bandwidth that large collectives reach: a prior, about what nccl-tests show of NVLink and IB."""
_STEP_S = 3e-6
"""What one step of a collective takes beside its link's latency when kernels wait for each other: a prior."""


@dataclass(frozen=True)
class Group:
    """The devices that take part in one collective: ``islands`` of ``each`` devices.

    ``inner`` and ``outer`` are None where no two devices are joined by one.
    """

    islands: int
    each: int
    inner: LinkSpec | None
    outer: LinkSpec | None

    @property
    def size(self) -> int:
        """How many devices take part."""
        return self.islands * self.each

    def seconds(self, kind: Kind, byte_count: float) -> float:
        """Return how long a collective takes.

        ``byte_count`` are those of the whole tensor: what is reduced, what is gathered, what is there before it is
        scattered.
        """
        if self.size == 1 or not byte_count:
            return 0.0
        if kind == "all_to_all":  # of its part each device keeps one part
            return self.seconds("all_gather", byte_count / self.size)
        ways = [self._ring(kind, byte_count)]
        if kind == "all_reduce":
            ways.append(self._tree(byte_count))
        if self.islands > 1 and self.each > 1:
            ways.append(self._hierarchical(kind, byte_count))
        return min(ways)

    def _ring(self, kind: Kind, byte_count: float) -> float:
        passes, steps = _passes(kind), self.size - 1
        slowest_s = max(self._byte_s(*route) for route in self._ways())
        return passes * (steps * self._latency_s() + steps / self.size * byte_count * slowest_s)

    def _tree(self, byte_count: float) -> float:
        depth = 2 * math.ceil(math.log2(self.size))
        slowest_s = max(self._byte_s(*route) for route in self._ways())
        return depth * self._latency_s() + 2 * byte_count * slowest_s

    def _hierarchical(self, kind: Kind, byte_count: float) -> float:
        inside, between = Group(1, self.each, self.inner, None), Group(self.islands, 1, None, self.outer)
        within: Kind = "all_gather" if kind == "all_gather" else "reduce_scatter"
        inner_s = _passes(kind) * inside.seconds(within, byte_count)
        return inner_s + between.seconds(kind, byte_count / self.each)

    def _ways(self) -> list[tuple[LinkSpec, int]]:
        """Return the kinds of links that a ring takes, and how many of them carry its traffic side by side."""
        inner = [] if self.inner is None else [(self.inner, 1)]
        return [*inner, (self.outer, self.each)] if self.outer is not None else inner

    def _byte_s(self, link: LinkSpec, beside: int) -> float:
        return 1 / (REACHED * link.bandwidth_bytes_per_s * beside)

    def _latency_s(self) -> float:
        return _STEP_S + max(link.latency_s for link, _ in self._ways()) / 2


def _passes(kind: Kind) -> int:
    """Return how often the bytes go around: a sum that all get is scattered, then gathered."""
    return 2 if kind == "all_reduce" else 1


def group_of(machine: MachineSpec, devices: Sequence[int]) -> Group:
    """Return the group of some of a machine's devices, by their numbers.

    Islands that differ in size count as those with the fewest devices.
    """
    places = [machine.island_of(device) for device in devices]
    sizes = Counter(places)
    each = min(sizes.values())
    if len(devices) != each * len(sizes):
        each = 1
    first, others = devices[0], list(zip(devices, places, strict=True))[1:]
    near = [machine.link(first, other) for other, island in others if island == places[0]]
    far = [machine.link(first, other) for other, island in others if island != places[0]]
    return Group(
        islands=len(devices) // each,
        each=each,
        inner=near[0] if near and each > 1 else None,
        outer=min(far, key=lambda link: link.bandwidth_bytes_per_s) if far else None,
    )
