from __future__ import annotations

import subprocess
import sys

import pytest

from cost_models import DeviceSpec, LinkSpec, Source, device, link, names


def test_names_are_the_devices_own():
    assert names() == sorted(names())
    assert {"cpu-lane", "H100-SXM5-80GB", "A100-SXM4-80GB", "V100-SXM2-16GB", "MI300X-192GB"} <= set(names())
    assert [device(name).name for name in names()] == names()


@pytest.mark.parametrize("name", names())
def test_every_device_is_plausible(name):
    spec = device(name)
    assert DeviceSpec.model_validate_json(spec.model_dump_json()) == spec
    assert 1e10 <= spec.peak("fp32") <= spec.peak("fp16") <= 1e16
    assert 5e9 <= spec.memory_bandwidth_bytes_per_s <= 2e13
    assert 1e-6 <= spec.launch_s <= 1e-4
    assert 1e10 <= spec.host_link.bandwidth_bytes_per_s <= link(name, name).bandwidth_bytes_per_s
    assert link(name, name).bandwidth_bytes_per_s <= 2 * spec.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize("name", [name for name in names() if name != "cpu-lane"])
def test_the_memory_of_a_gpu_is_the_gigabytes_in_its_name(name):
    in_name = int(name.rpartition("-")[2].removesuffix("GB")) * 2**30
    assert 0.93 * in_name <= device(name).memory_bytes <= in_name


def test_the_cpu_lane_claims_nothing_that_was_not_measured():
    lane = device("cpu-lane")
    assert lane.memory_bytes is None
    assert {source.status for spec in (lane, lane.host_link) for source in spec.sources.values()} == {"prior"}


def test_dense_figures_of_the_h100():
    h100 = device("H100-SXM5-80GB")
    assert (h100.peak("bf16"), h100.peak("tf32"), h100.peak("fp32")) == (989e12, 495e12, 67e12)
    assert h100.memory_bandwidth_bytes_per_s == 3.35e12
    assert h100.source("peak_flops_per_s.bf16").status == "datasheet"


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ValueError, match="there is no device 'H100'; known devices: ") as caught:
        device("H100")
    assert all(name in str(caught.value) for name in names())
    assert "JSON file" in str(caught.value)


def test_a_name_is_no_path():
    with pytest.raises(ValueError, match="there is no device"):
        device("../devices/cpu-lane")


def test_a_device_from_a_file(tmp_path):
    mine = device("T4-16GB").model_copy(update={"name": "mine", "memory_bytes": 12_345})
    path = tmp_path / "mine.json"
    path.write_text(mine.model_dump_json(), encoding="utf-8")
    assert device(path) == device(str(path)) == mine
    assert link(path, "T4-16GB") == device("T4-16GB").host_link


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the device file '.*none\.json': No such file"):
        device(tmp_path / "none.json")


def test_a_file_that_is_no_device(tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text('{"name": "wrong"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.json' does not describe a device: sources: Field required \("):
        device(path)


def test_peers_of_one_kind_use_their_peer_link():
    assert link("H100-SXM5-80GB", "H200-SXM-141GB") == device("H100-SXM5-80GB").peer_link
    assert link("H100-SXM5-80GB", "H100-SXM5-80GB").bandwidth_bytes_per_s == 450e9


def test_other_pairs_go_through_the_host_at_the_slower_end():
    assert link("A100-SXM4-80GB", "H100-SXM5-80GB") == device("A100-SXM4-80GB").host_link
    assert link("H100-SXM5-80GB", "A100-SXM4-80GB") == device("A100-SXM4-80GB").host_link
    assert link("L4-24GB", "L4-24GB") == device("L4-24GB").host_link


def test_the_slower_end_gives_the_bandwidth_and_the_later_end_the_latency():
    told = Source(status="measured", text="told")
    quick = device("L4-24GB")
    sources = {"bandwidth_bytes_per_s": told, "latency_s": told}
    slow_start = LinkSpec(name="wire", bandwidth_bytes_per_s=1e15, latency_s=1.0, sources=sources)
    late = quick.model_copy(update={"host_link": slow_start})
    for pair in ((quick, late), (late, quick)):
        assert link(*pair).latency_s == 1.0
        assert link(*pair).source("latency_s") == told
        assert link(*pair).bandwidth_bytes_per_s == quick.host_link.bandwidth_bytes_per_s
        assert link(*pair).source("bandwidth_bytes_per_s") == quick.host_link.source("bandwidth_bytes_per_s")


def test_the_package_runs_without_torch_and_without_autosplit():
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['autosplit'] = sys.modules['numpy'] = None\n"
        "import cost_models\n"
        "lane = cost_models.device('cpu-lane')\n"
        "work = cost_models.OpWork(kind='matmul', flops=10**9, bytes=10, dtype='fp32')\n"
        "print(cost_models.Roofline(lane).seconds(work) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
