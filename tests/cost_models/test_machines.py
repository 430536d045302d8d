from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models import HostSpec, LinkSpec, MachineSpec, device, find, machine, machine_names, names
from cost_models.registry import spread, usual
from tests.cost_models.test_specs import GUESS, make_link

SOME = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "L4-24GB", "V100-SXM2-32GB", "H100-NVL-94GB", "cpu-lane")


HOST = HostSpec(issue_threads=1, sources={"issue_threads": GUESS})


def texts() -> st.SearchStrategy[str]:
    """Every text form: kinds of devices on one host, or hosts that are alike."""
    run = st.tuples(st.integers(1, 9), st.sampled_from(SOME))
    mixed = (
        st.lists(run, min_size=1, max_size=4)
        .map(merged)
        .map(lambda runs: "+".join(f"{count}x{name}" for count, name in runs))
    )
    hosts = st.tuples(st.integers(2, 4), run).map(lambda pair: f"{pair[0]}x{pair[1][0]}x{pair[1][1]}")
    return st.one_of(mixed, hosts, st.sampled_from(machine_names()))


def merged(runs: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Join neighbours of one kind, as the text form does."""
    joined: list[tuple[int, str]] = []
    for count, name in runs:
        if joined and joined[-1][1] == name:
            joined[-1] = (joined[-1][0] + count, name)
        else:
            joined.append((count, name))
    return joined


@given(texts())
def test_a_text_round_trips(text):
    spec = machine(text)
    assert spec.name == str(spec) == text
    assert machine(str(spec)) == spec


@given(texts())
def test_json_round_trip(text):
    spec = machine(text)
    assert MachineSpec.model_validate_json(spec.model_dump_json()) == spec


@given(texts().map(machine), st.data(), st.integers(0, 2**40), st.integers(1, 2**40))
def test_more_bytes_never_take_less_time(spec, data, count, more):
    first, second = (data.draw(st.integers(0, len(spec) - 1)) for _ in range(2))
    assert spec.transfer_s(first, second, count + more) >= spec.transfer_s(first, second, count) >= 0
    assert spec.transfer_s(first, first, count) == 0


def test_the_machines_that_come_with_the_package():
    assert {"8xH100-SXM5-80GB", "8xA100-SXM4-80GB", "8xH200-SXM-141GB", "8xB200-SXM-180GB"} <= set(machine_names())
    assert {"4xL4-24GB", "4xA10G-24GB", "2xRTX4090-24GB", "4xT4-16GB", "8xP40-24GB"} <= set(machine_names())
    for name in machine_names():
        spec = machine(name)
        assert spec.name == name
        assert spec.notes
        assert find(name) == spec
        assert {entry.name for entry in spec.devices} <= set(names())
        assert spec.network is None or 1e9 <= spec.network.bandwidth_bytes_per_s <= 1e11


def test_mixed_devices_meet_at_the_slower_end():
    mixed = machine("2xA100-SXM4-80GB+1xH100-SXM5-80GB+1xT4-16GB")
    assert [entry.name for entry in mixed.devices] == ["A100-SXM4-80GB"] * 2 + ["H100-SXM5-80GB", "T4-16GB"]
    assert mixed.link(0, 1).name == "NVLink 3"
    assert mixed.link(1, 2) == device("A100-SXM4-80GB").host_link
    assert mixed.link(2, 3) == device("T4-16GB").host_link


def test_hosts_meet_over_the_network():
    two = machine("2x8xH100-SXM5-80GB")
    assert (len(two), two.host_devices, two.host_of(7), two.host_of(8)) == (16, (8, 8), 0, 1)
    assert two.link(6, 7).name == two.link(8, 9).name == "NVLink 4"
    assert two.link(7, 8).name == "network"
    dgx = machine("8xH100-SXM5-80GB")
    assert (two.network, two.host, two.notes) == (dgx.network, dgx.host, "2 x DGX H100")
    assert machine("2x1xT4-16GB").link(0, 1).name == "PCIe 3.0 x16"
    assert machine("3x2xL40S-48GB").network.source("bandwidth_bytes_per_s").status == "prior"


def test_a_peer_group_ends():
    sixteen = machine("16xH100-SXM5-80GB")
    assert sixteen.link(0, 7).name == sixteen.link(8, 15).name == "NVLink 4"
    assert sixteen.link(7, 8).name == "PCIe 5.0 x16"
    assert machine("4xH100-NVL-94GB").link(0, 1).name == "NVLink 4 bridge"
    assert machine("4xH100-NVL-94GB").link(1, 2).name == "PCIe 5.0 x16"
    assert machine("72xGB200-186GB").link(0, 71).name == "NVLink 5"


def test_cpu_lanes_issue_their_own_work():
    assert machine("4xcpu-lane").host.issue_threads == 4
    assert machine("3xcpu-lane").host.issue_threads == 3
    assert machine("3xT4-16GB").host.issue_threads == 1
    assert machine("4xcpu-lane").link(0, 3).name == "host memory"


def test_no_devices():
    with pytest.raises(ValueError, match="a machine has at least one device"):
        machine([])


def test_an_unknown_device_in_a_text_is_told_the_nearest():
    nearest = "H100-NVL-94GB, H100-PCIe-80GB, H100-SXM5-80GB; autosplit devices lists all"
    with pytest.raises(
        ValueError, match=rf"there is no device 'H1000' in '2xL4-24GB\+8xH1000', the nearest: {nearest}"
    ):
        machine("2xL4-24GB+8xH1000")


@pytest.mark.parametrize(
    ("text", "name", "taken"),
    [
        ("8xH100", "8xH100-SXM5-80GB", ("8xH100: taken as H100-SXM5-80GB",)),
        ("8Xa100-80gb", "8xA100-SXM4-80GB", ("8Xa100-80gb: taken as A100-SXM4-80GB",)),
        ("a100 40GB", "1xA100-SXM4-40GB", ("a100 40GB: taken as A100-SXM4-40GB",)),
        ("2x4090+l4", "2xRTX4090-24GB+1xL4-24GB", ("2x4090: taken as RTX4090-24GB", "l4: taken as L4-24GB")),
        ("2x8xH100-PCIe", "2x8xH100-PCIe-80GB", ("2x8xH100-PCIe: taken as H100-PCIe-80GB",)),
        ("4xl40s-48gb", "4xL40S-48GB", ()),
    ],
)
def test_a_short_name_is_the_usual_device_and_says_so(text: str, name: str, taken: tuple[str, ...]) -> None:
    assert (machine(text).name, machine(text).taken) == (name, taken)
    assert spread(machine(f"{text}")).taken == taken
    assert "taken" not in machine(text).model_dump()


def test_short_names_in_a_list_and_on_several_hosts() -> None:
    mixed = machine(["H100", "L4-24GB"])
    assert (mixed.name, mixed.taken) == ("1xH100-SXM5-80GB+1xL4-24GB", ("H100: taken as H100-SXM5-80GB",))
    hosts = spread(machine("64xh100"))
    assert (hosts.name, hosts.taken) == ("8x8xH100-SXM5-80GB", ("64xh100: taken as H100-SXM5-80GB",))
    assert all(usual(known) == known for known in names())
    assert usual("H1000") is usual("A10") is usual("") is None


def write(path: Path, **fields: Any) -> Path:
    host = {"issue_threads": 1, "sources": {"issue_threads": {"status": "prior", "text": "one process"}}}
    path.write_text(json.dumps({"name": "box", "host": host} | fields), encoding="utf-8")
    return path


def test_a_file_with_hosts_and_links_of_its_own(tmp_path):
    def dumped(link: LinkSpec) -> Any:
        return json.loads(link.model_dump_json())

    path = write(
        tmp_path / "box.json",
        devices=["RTX3090-24GB"] * 5,
        host_devices=[2, 3],
        network=dumped(make_link(name="net")),
        links=[
            {"devices": [3, 2], "link": dumped(make_link(name="bridge", bandwidth_bytes_per_s=5e10, latency_s=1e-6))}
        ],
    )
    box = machine(path)
    assert [[box.link(i, j).name for j in range(5) if j != i] for i in range(3)] == [
        ["PCIe 4.0 x16", "net", "net", "net"],
        ["PCIe 4.0 x16", "net", "net", "net"],
        ["net", "net", "bridge", "PCIe 4.0 x16"],
    ]
    assert [box.host_of(i) for i in range(5)] == [0, 0, 1, 1, 1]
    assert find(path) == machine(str(path)) == box


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([(0, 0)], r"links has \(0, 0\), no pair of different devices numbered 0 to 1"),
        ([(0, 2)], r"links has \(0, 2\), no pair"),
        ([(0, 1), (1, 0)], r"links has \(0, 1\) 2 times"),
    ],
)
def test_links_of_pairs_that_do_not_exist(links, said):
    entries = [{"devices": pair, "link": make_link()} for pair in links]
    with pytest.raises(ValidationError, match=said):
        MachineSpec(name="m", devices=(device("T4-16GB"),) * 2, host_devices=(2,), host=HOST, links=entries)
