"""What NCCL keeps of a device so that processes can send to each other: a communicator of two ranks per directed pair.

```
[0] ── values ────► [1]      a sender has small buffers in each of the communicator's channels,
[0] ◄── gradients ─ [1]      a receiver large ones: here each has both
```

No figure was measured here. They are the defaults of NCCL 2.30.7, as its sources have them:

- ``src/init.cc``: a connection has buffers for three protocols, of 512 KiB (LL), 4.69 MiB (LL128) and 4 MiB (Simple,
  ``NCCL_BUFFSIZE``).
- ``src/transport/p2p.cc``: on one host they are the receiver's, and the sender has a header; both are rounded up to
  2 MiB. A log of eight H100 has these sizes and 32 channels for each pair (NVIDIA/nccl, issue 1685).
- ``src/graph/paths.cc``: a pair has two channels, or two for each of its NVLinks, as a power of two; no more than its
  communicator has, which were 64 on a B300 (issue 2363).
- ``src/transport/net.cc``: between hosts both ends have 16 chunks of 128 KiB for each channel of the communicator.
- ``src/graph/rings.cc``: a group's ring has a connection to either neighbour in every channel; 16 are taken. Two
  buckets of 25 MiB, DDP's default, are counted with a group.

What depends on the machine is a high estimate. RCCL is taken to do as NCCL does.
"""

from __future__ import annotations

from collections.abc import Iterable

from cost_models.collectives import Group
from cost_models.machines import MachineSpec

_MIB = 2**20
_SENDS, _RECEIVES = 2 * _MIB, 10 * _MIB
"""Of a channel, on one host."""
_NETWORK = 16 * 128 * 2**10
"""Of a channel, at each end between hosts."""
_NETWORK_CHANNELS = 32


_RING_CHANNELS = 16
_BUCKET = 25 * _MIB


def collective_bytes(group: Group) -> int:
    """Return the bytes that NCCL keeps of a device for the collectives of a group that it is in, with a bucket each."""
    if group.size == 1:
        return 0
    return _RING_CHANNELS * (_SENDS + _RECEIVES) + 2 * _BUCKET


def communicator_bytes(machine: MachineSpec, pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the bytes that NCCL keeps of each device of a machine for the directed pairs that send.

    ``pairs`` are the numbers of the sender and the receiver; each counts once.
    """
    kept = [0] * len(machine)
    for source, target in set(pairs):
        if machine.host_of(source) != machine.host_of(target):
            sends = receives = _NETWORK_CHANNELS * _NETWORK
        else:
            channels = _channels(machine, source, target)
            sends, receives = channels * _SENDS, channels * _RECEIVES
        kept[source] += sends
        kept[target] += receives
    return tuple(kept)


def _channels(machine: MachineSpec, source: int, target: int) -> int:
    """Return how many channels a pair on one host has: NVLinks have 25 GB/s each way, from Blackwell on 50 GB/s."""
    link, first = machine.link(source, target), machine.devices[source]
    if first.peer_link is None or link.name != first.peer_link.name:
        return 2
    major = (first.compute_capability or "").partition(".")[0]
    each, most = (50e9, 64) if major.isdecimal() and int(major) >= 10 else (25e9, 32)
    wanted = 2 * max(1, round(link.bandwidth_bytes_per_s / each))
    return min(most, 1 << (wanted - 1).bit_length())
