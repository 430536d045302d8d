"""How long a collective of many devices takes, from the links between them.

```
    island 0           island 1        an island: devices with a peer link between any two of them
    [0]══[1]══[2]      [3]══[4]══[5]   ═  inner link: a device's own, to all of its island
     │    │    │        │    │    │    │  outer link: each device's own way to other islands
     └────┴────┴─network┴────┴────┘
```

Weighed are two algorithms, each by three protocols, and the fastest is taken, as NCCL does (``src/graph/tuning.cc``):

- *ring*: every device sends to its neighbour. The traffic between two islands is spread over all devices of an island.
- *tree*: two pipelined binary trees, for all-reduces: as many bytes, a latency that grows with the logarithm.
- *protocols*: those with little latency have little bandwidth, so that small messages are far from a link's bandwidth.

Rabenseifner 2004 and Thakur et al. 2005 derive the formulas; Sanders et al. 2009 the two trees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cost_models.machines import MachineSpec
from cost_models.specs import LinkSpec

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

REACHED = 0.8
"""The part of a link's bandwidth that large collectives reach inside an island: all-gathers of 8 GiB reach 235 GB/s of
A100's 300, 366 of H200's 450, 682 of B200's 900 (stas00/ml-engineering, network/README.md, 744d01e)."""
_NETWORK, _PER_DOUBLING = 0.97, 0.965
"""The same between islands, and what each doubling of their number leaves of it: reduce-scatters of 4, 8, 16, 32, 64
and 128 hosts of H100 reach 360, 345, 320, 300, 280 and 260 GB/s of 400 (NVIDIA/nccl, issue 1229)."""
BESIDE = 0.2
"""How much longer work takes beside a collective, as a part of the collective's time: its kernels keep 24 of the 132
multiprocessors of an H100, a product beside them took 1.7 times as long (forums.developer.nvidia.com, topic 337991)."""


class _Protocol(NamedTuple):
    """How much of a link's bandwidth a protocol of NCCL has, and what it takes once and for each step, in seconds.

    Figures: ``baseLat`` and ``hwLat`` of ``src/graph/tuning.cc`` at 01afd20; trees of the last protocol are as rings.
    """

    share: float
    base_s: float
    inner_s: float
    outer_s: float
    tree_inner_s: float
    tree_outer_s: float


_PROTOCOLS = (
    _Protocol(0.25, 4e-6, 0.85e-6, 2.7e-6, 0.94e-6, 5e-6),  # LL
    _Protocol(0.92, 10e-6, 1.9e-6, 4e-6, 1.2e-6, 8.5e-6),  # LL128
    _Protocol(1.0, 8.4e-6, 3.4e-6, 9.6e-6, 28e-6, 50e-6),  # Simple
)
_TYPICAL_S = 5e-6, 1e-5
"""The latencies of links that the steps above are for: of an inner and an outer one; others in proportion."""
_TREE = 0.9
"""The part of a ring's bandwidth that trees have (``src/graph/tuning.cc``)."""


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
        return min(self._ways(kind, byte_count))

    def _ways(self, kind: Kind, byte_count: float) -> Iterator[float]:
        """Yield how long each algorithm takes by each protocol."""
        byte_s, passes = self._byte_s(), _passes(kind)
        inner, outer = self._latencies()
        hops, steps = passes * (self.islands - 1), passes * (self.size - 1)
        depth = 2 * math.ceil(math.log2(self.islands))
        for protocol in _PROTOCOLS:
            latency_s = (steps - hops) * protocol.inner_s * inner + hops * protocol.outer_s * outer
            yield protocol.base_s + latency_s + steps / self.size * byte_count * byte_s / protocol.share
            if kind == "all_reduce":
                inside_s = 2 * (self.each - 1) * protocol.tree_inner_s * inner
                latency_s = inside_s + depth * protocol.tree_outer_s * outer
                yield protocol.base_s + latency_s + 2 * byte_count * byte_s / (protocol.share * _TREE)

    def _byte_s(self) -> float:
        """Return what a byte takes on the slowest link of a ring; between islands it has all of an island's links."""
        inner = 0.0 if self.inner is None else 1 / (REACHED * self.inner.bandwidth_bytes_per_s)
        if self.outer is None:
            return inner
        reached = _NETWORK * _PER_DOUBLING ** math.log2(self.islands)
        return max(inner, 1 / (reached * self.outer.bandwidth_bytes_per_s * self.each))

    def _latencies(self) -> tuple[float, float]:
        """Return the links' latencies over typical ones."""
        links = zip((self.inner, self.outer), _TYPICAL_S, strict=True)
        inner, outer = (0.0 if link is None else link.latency_s / typical_s for link, typical_s in links)
        return inner, outer


def longer_s(collective_s: float, work_s: float) -> float:
    """Return how much longer than alone work takes with collectives beside it: it is slower, and waits for the rest."""
    slower_s = BESIDE * min(collective_s, work_s)
    return slower_s + max(0.0, collective_s - work_s - slower_s)


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
