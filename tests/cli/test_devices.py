"""``autosplit devices``: the tables, the figures with their sources, and what happens to a name nobody knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cost_models import DeviceSpec, MachineSpec, device, find, machine_names, names
from tests.cli.conftest import command, error_of

run = command("devices")


def row(table: str, first: str) -> list[str]:
    """Return the cells of the one row that starts with ``first``."""
    [line] = [line for line in table.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_every_device_and_machine_is_listed() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    firsts = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert [name for name in (*names(), *machine_names()) if firsts.count(name) != 1] == []


def test_a_row_says_memory_rates_links_and_trust() -> None:
    rates = ["1979", "989", "989", "495", "67", "67"]
    assert row(run().stdout, "H100-SXM5-80GB") == (
        ["H100-SXM5-80GB", "78.7", "GiB", "3.35", *rates, "450", "64", "1", "12", "0", "5"]
    )


def test_a_device_with_the_source_of_every_figure() -> None:
    result = run("H200-SXM-141GB")
    assert result.exit_code == 0, result.output
    spec = device("H200-SXM-141GB")
    for figure in spec.figures():
        source = spec.source(figure)
        assert [line for line in result.stdout.splitlines() if figure in line and source.text in line], figure
    assert "to the host: PCIe 5.0 x16" in result.stdout
    assert "to a neighbour: NVLink 4" in result.stdout


@pytest.mark.parametrize("name", ["L4-24GB", "8xH100-SXM5-80GB", "2x4xL4-24GB", "1xL4-24GB"])
def test_the_json_of_one_is_a_file_that_every_name_may_be(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(run(name, "--json").stdout, encoding="utf-8")
    assert find(path) == find(name)
    assert isinstance(find(name), DeviceSpec if name in names() else MachineSpec)
    again = run(str(path))
    assert again.exit_code == 0, again.output
    assert again.stdout == run(name).stdout


def test_an_unknown_name_exits_with_2_and_the_nearest() -> None:
    said = error_of(run("4xH1000"))
    assert "the nearest: H100-NVL-94GB, H100-PCIe-80GB, H100-SXM5-80GB; autosplit devices lists all" in said
    assert "8xH100" in said
    assert "A100" not in said.partition("lists all")[0]


def test_a_malformed_file_exits_with_2_and_the_range(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    fields = json.loads(device("T4-16GB").model_dump_json()) | {"memory_bandwidth_bytes_per_s": 320}
    path.write_text(json.dumps(fields), encoding="utf-8")
    result = run(str(path))
    assert result.exit_code == 2
    assert "memory_bandwidth_bytes_per_s is 320: Input should be greater than or equal to 1000000" in result.stderr
