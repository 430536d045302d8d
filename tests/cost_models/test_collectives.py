"""Groups of a machine's devices: known formulas of rings and trees, networks by their speed, what NCCL keeps."""

from __future__ import annotations

import pytest

from cost_models.collectives import REACHED, Group, Kind, group_of
from cost_models.communicators import communicator_bytes
from cost_models.machines import MachineSpec
from cost_models.registry import machine, networked, spread


@pytest.fixture(scope="module")
def hosts() -> MachineSpec:
    return machine("4x8xH100-SXM5-80GB")


def test_islands_are_hosts(hosts: MachineSpec) -> None:
    """Neighbours share a host, every eighth device is on another."""
    near, far = group_of(hosts, range(8)), group_of(hosts, range(0, 32, 8))
    assert (near.islands, near.each, near.outer) == (1, 8, None)
    assert (far.islands, far.each, far.inner) == (4, 1, None)
    both = group_of(hosts, range(32))
    assert (both.islands, both.each) == (4, 8)
    assert both.outer == far.outer == hosts.network
    assert group_of(hosts, range(8)).inner == hosts.devices[0].peer_link


def test_large_tensors_take_their_bytes_over_the_bandwidth(hosts: MachineSpec) -> None:
    """A ring of n moves (n - 1) / n of the bytes over each link, twice for a sum."""
    near = group_of(hosts, range(8))
    assert near.inner is not None
    once_s = 7 / 8 * 2**34 / (REACHED * near.inner.bandwidth_bytes_per_s)
    assert near.seconds("all_gather", 2**34) == pytest.approx(once_s, rel=0.01)
    assert near.seconds("reduce_scatter", 2**34) == near.seconds("all_gather", 2**34)
    assert near.seconds("all_reduce", 2**34) == pytest.approx(2 * once_s, rel=0.01)


def test_hosts_share_the_traffic_of_a_large_sum(hosts: MachineSpec) -> None:
    """Eight adapters a host carry it: eight times as fast as one device per host, at most."""
    whole, one = group_of(hosts, range(32)), group_of(hosts, range(0, 32, 8))
    ratio = one.seconds("all_reduce", 2**34) / whole.seconds("all_reduce", 2**34)
    assert 4 < ratio < 8


def test_small_sums_take_a_tree(hosts: MachineSpec) -> None:
    """Of many ranks latencies count: they grow with the logarithm, not with the number; gathers take rings."""
    network = hosts.network
    assert network is not None
    few, many = (Group(count, 1, None, network).seconds("all_reduce", 8) for count in (16, 256))
    assert many == pytest.approx(2 * few, rel=0.1)
    few, many = (Group(count, 1, None, network).seconds("all_gather", 8) for count in (16, 256))
    assert many > 10 * few


def test_one_device_sends_nothing(hosts: MachineSpec) -> None:
    """A group of one takes no time, and more bytes never take less."""
    assert group_of(hosts, [3]).seconds("all_reduce", 2**30) == 0.0
    times = [group_of(hosts, range(16)).seconds("all_reduce", 2.0**power) for power in range(40)]
    assert times == sorted(times)


def test_many_devices_of_one_host_are_spread() -> None:
    """64 H100 are eight hosts of eight, and what is on several hosts stays."""
    assert spread(machine("64xH100-SXM5-80GB")).host_devices == (8,) * 8
    for text in ("8xH100-SXM5-80GB", "2x8xH100-SXM5-80GB", "4xL4-24GB", "12xH100-SXM5-80GB"):
        assert spread(machine(text)) == machine(text)


@pytest.mark.parametrize(
    ("text", "count", "kind", "size", "measured"),
    [
        ("4x8xB200-SXM-180GB", 8, "all_reduce", 2**30, 723),
        ("4x8xB200-SXM-180GB", 32, "all_reduce", 2**30, 362),
        ("4x8xB200-SXM-180GB", 32, "all_reduce", 2**34, 382),
        ("1x8xH200-SXM-141GB", 8, "all_gather", 2**33, 366),
        ("1x8xA100-SXM4-80GB", 8, "all_gather", 2**33, 235),
        ("32x8xH100-SXM5-80GB", 128, "reduce_scatter", 2**33, 320),
        ("32x8xH100-SXM5-80GB", 256, "reduce_scatter", 2**33, 300),
    ],
)
def test_published_bus_bandwidths(text: str, count: int, kind: Kind, size: int, measured: float) -> None:
    """GB/s as nccl-tests count them (sources: the constants of the module); within 6%."""
    group = group_of(machine(text), range(count))
    passes = 2 if kind == "all_reduce" else 1
    assert passes * (count - 1) / count * size / group.seconds(kind, size) / 1e9 == pytest.approx(measured, rel=0.06)


def test_a_small_message_does_not_reach_the_bandwidth(hosts: MachineSpec) -> None:
    """Per byte a MiB takes at least four times as long as a GiB, and twice the latency of a network is felt."""
    near = group_of(hosts, range(8))
    assert near.seconds("all_reduce", 2**20) > 4 * near.seconds("all_reduce", 2**30) / 2**10
    network = hosts.network
    assert network is not None
    slow = network.model_copy(update={"latency_s": 2 * network.latency_s})
    small = [Group(32, 1, None, link).seconds("all_gather", 2**16) for link in (network, slow)]
    assert small[1] > 1.5 * small[0]


@pytest.mark.parametrize(
    ("speed", "each"), [("400Gbit", 6.25e9), ("8x400Gbit", 50e9), ("100Gbps", 1.5625e9), ("12.5GB/s", 1.5625e9)]
)
def test_devices_share_what_their_host_has(speed: str, each: float) -> None:
    """The name says the network, and is a text form again."""
    made = networked(machine("4x8xH100-SXM5-80GB"), speed)
    assert made.link(0, 8).bandwidth_bytes_per_s == pytest.approx(each)
    assert made.link(0, 1) == machine("8xH100-SXM5-80GB").link(0, 1)
    assert made.name == f"4x8xH100-SXM5-80GB@{speed}"
    assert machine(made.name) == made


def test_many_devices_are_hosts() -> None:
    """64 devices are eight hosts where there is a network; another speed takes the place of the first."""
    made = networked(machine("64xH100-SXM5-80GB"), "400Gbit")
    assert made.host_devices == (8,) * 8
    assert networked(made, "100Gbit").name == "8x8xH100-SXM5-80GB@100Gbit"


@pytest.mark.parametrize("speed", ["100", "fast", "0Gbit", "100 G", "-3Gbit"])
def test_what_is_no_speed(speed: str) -> None:
    """The error says what is one."""
    with pytest.raises(ValueError, match=r'is no speed; give one such as "100Gbit"'):
        networked(machine("2x8xH100-SXM5-80GB"), speed)


def test_one_host_has_no_network() -> None:
    """Eight devices with links between all of them are one host."""
    with pytest.raises(ValueError, match="is one host, without a network"):
        machine("8xH100-SXM5-80GB@100Gbit")


MIB = 2**20
BOTH = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("4xH100-SXM5-80GB", 32),  # 18 NVLinks: 36, and no more than 32
        ("4xA100-SXM4-80GB", 32),  # 12: 24, as a power of two
        ("4xB200-SXM-180GB", 64),
        ("4xV100-SXM2-32GB", 2),  # one NVLink
        ("4xL4-24GB", 2),  # PCIe
    ],
)
def test_a_sender_keeps_2_mib_and_a_receiver_10_in_each_channel(name: str, channels: int) -> None:
    assert communicator_bytes(machine(name), [(0, 1)]) == (2 * channels * MIB, 10 * channels * MIB, 0, 0)
    end = 12 * channels * MIB
    assert communicator_bytes(machine(name), BOTH) == (end, 2 * end, 2 * end, end)


def test_between_hosts_both_ends_keep_as_much() -> None:
    found = communicator_bytes(machine("2x2xH100-SXM5-80GB"), BOTH)
    end = 32 * 12 * MIB
    assert found == (end, end + 128 * MIB, end + 128 * MIB, end)
    assert communicator_bytes(machine("2x2xL4-24GB"), [(1, 2)]) == (0, 64 * MIB, 64 * MIB, 0)


def test_a_pair_counts_once_and_a_bridge_is_for_its_two() -> None:
    bridged = machine("4xH100-NVL-94GB")
    assert communicator_bytes(bridged, [(0, 1), (0, 1)]) == (64 * MIB, 320 * MIB, 0, 0)
    assert communicator_bytes(bridged, [(1, 2)]) == (0, 4 * MIB, 20 * MIB, 0)
    assert communicator_bytes(bridged, []) == (0, 0, 0, 0)
