"""A network between hosts by its speed."""

from __future__ import annotations

import pytest

from cost_models.registry import machine, networked


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
