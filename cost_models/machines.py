"""Several devices and the ways between them: peer links in a group, the host's memory, the network between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cost_models.specs import DeviceSpec, LinkSpec, MemoryBytes, Record, Spec


class HostSpec(Spec):
    """The host of a machine's devices; the hosts of one machine are alike.

    Attributes:
        memory_bytes: of one host; None when it is not known.
        cores: physical cores of one host; None when they are not known.
        issue_threads: how many threads issue kernels: each takes ``issue_s`` of its devices for every kernel.
    """

    memory_bytes: MemoryBytes | None = None
    cores: PositiveInt | None = None
    issue_threads: PositiveInt


class PairLink(Record):
    """A link between two devices of a machine, by their numbers, in both directions."""

    devices: tuple[NonNegativeInt, NonNegativeInt]
    link: LinkSpec


class MachineSpec(Record):
    """Devices in order, and the link that a transfer between any two of them takes.

    ```
    host 0                          host 1
    [0]══peer link══[1]   [2]═══[3]    [4]═══[5] ...      ═  within a peer group of neighbours
     └──── host memory ────┘            │                 ─  else through the host: the slower of two host links
     └────────────── network ───────────┘                    and between hosts through the network
    ```

    Attributes:
        name: a text form such as ``2xH100-SXM5-80GB+1xL4-24GB``, or any other name.
        devices: equal or mixed.
        host_devices: how many devices each host has, in order; they sum to the number of devices.
        host: what every host is like.
        network: one device's way to another host; None on a single host.
        links: pairs whose link is another than the rules give, such as two cards with a bridge.
        notes: what else a reader should know.
        taken: which devices were taken to be meant by short names, in words.
    """

    name: str = Field(min_length=1)
    devices: Annotated[tuple[DeviceSpec, ...], Field(min_length=1)]
    host_devices: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    host: HostSpec
    network: LinkSpec | None = None
    links: tuple[PairLink, ...] = ()
    notes: str = ""
    taken: tuple[str, ...] = Field(default=(), exclude=True)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        count = len(self.devices)
        if sum(self.host_devices) != count:
            raise ValueError(f"host_devices is {list(self.host_devices)}, in all {sum(self.host_devices)}, of {count}")
        if len(self.host_devices) > 1 and self.network is None:
            raise ValueError(f"{len(self.host_devices)} hosts and no network between them; give network, a link")
        pairs = [tuple(sorted(pair.devices)) for pair in self.links]
        wrong = [pair for pair in pairs if pair[0] == pair[1] or pair[1] >= count]
        if wrong:
            raise ValueError(f"links has {wrong[0]}, no pair of different devices numbered 0 to {count - 1}")
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"links has {max(pairs, key=pairs.count)} {max(map(pairs.count, pairs))} times")
        return self

    def __str__(self) -> str:
        return self.name

    def __len__(self) -> int:
        return len(self.devices)

    def taking(self, order: Sequence[int]) -> MachineSpec:
        """Return the machine of one host with some of its devices, in the order of these numbers."""
        devices = tuple(self.devices[number] for number in order)
        name = "+".join(device.name for device in devices)
        return self.model_copy(update={"name": name, "devices": devices, "host_devices": (len(devices),)})

    def host_of(self, device: int) -> int:
        """Return the number of the host that a device is on."""
        return self._place(device)[0]

    def island_of(self, device: int) -> tuple[int, int]:
        """Return the host of a device and its group there: devices of one island have a peer link between any two.

        A device without a peer link shares its host's memory with all others there.
        """
        host, slot = self._place(device)
        group = self.devices[device].peer_group
        return host, 0 if group is None else slot // group

    def link(self, source: int, target: int) -> LinkSpec:
        """Return the link that a transfer between two devices takes, by their numbers; the same in both directions.

        Raises:
            ValueError: there is no such device, or it is twice the same, which needs no link.
        """
        (source_host, source_slot), (target_host, target_slot) = self._place(source), self._place(target)
        if source == target:
            raise ValueError(f"device {source} of {self.name} needs no link to itself; a transfer there takes no time")
        for pair in self.links:
            if set(pair.devices) == {source, target}:
                return pair.link
        first, second = self.devices[source], self.devices[target]
        if source_host != target_host:
            assert self.network is not None
            return slower(self.network, slower(first.host_link, second.host_link))
        if share_peer_link(first, second) and all(
            device.peer_group is None or source_slot // device.peer_group == target_slot // device.peer_group
            for device in (first, second)
        ):
            return direct_link(first, second)
        return slower(first.host_link, second.host_link)

    def transfer_s(self, source: int, target: int, byte_count: int) -> float:
        """Return the seconds that one transfer takes, alone on its link; 0 within a device."""
        if source == target:
            self._place(source)
            return 0.0
        return self.link(source, target).transfer_s(byte_count)

    def _place(self, device: int) -> tuple[int, int]:
        """Return a device's host, and its number among that host's devices."""
        if not 0 <= device < len(self.devices):
            raise ValueError(f"{self.name} has {len(self.devices)} devices, 0 to {len(self.devices) - 1}, no {device}")
        slot = device
        for host, count in enumerate(self.host_devices):
            if slot < count:
                return host, slot
            slot -= count
        raise AssertionError("host_devices sum to the number of devices")


def direct_link(first: DeviceSpec, second: DeviceSpec) -> LinkSpec:
    """Return the link between two neighbours: the peer link that both have, else the way through the host."""
    if first.peer_link is not None and second.peer_link is not None and share_peer_link(first, second):
        return slower(first.peer_link, second.peer_link)
    return slower(first.host_link, second.host_link)


def share_peer_link(first: DeviceSpec, second: DeviceSpec) -> bool:
    """Tell whether two devices have the same kind of peer link."""
    return (
        first.peer_link is not None and second.peer_link is not None and first.peer_link.name == second.peer_link.name
    )


def slower(first: LinkSpec, second: LinkSpec) -> LinkSpec:
    """Return what two links in a row are: the bandwidth of the narrower, the latency of the later."""
    narrow, wide = sorted((first, second), key=lambda spec: (spec.bandwidth_bytes_per_s, spec.name))
    if narrow.latency_s >= wide.latency_s:
        return narrow
    sources = {
        "bandwidth_bytes_per_s": narrow.source("bandwidth_bytes_per_s"),
        "latency_s": wide.source("latency_s"),
    }
    return LinkSpec(
        name=narrow.name,
        bandwidth_bytes_per_s=narrow.bandwidth_bytes_per_s,
        latency_s=wide.latency_s,
        sources=sources,
    )
