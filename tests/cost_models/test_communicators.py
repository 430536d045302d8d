"""What NCCL keeps of each device: figures worked out by hand from those of its sources."""

from __future__ import annotations

import pytest

from cost_models import machine
from cost_models.communicators import communicator_bytes

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
